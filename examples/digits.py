"""Train a small convolutional network on handwritten digits, on as many ranks as mpirun starts.

mpirun -np 2 python examples/digits.py
"""

import hashlib

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_ring as kr

kr.init()
rank, size = kr.rank(), kr.size()
keras.utils.set_random_seed(rank)  # repeatable, and each rank draws its own dropout masks

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    digits.images[..., None] / 16.0, digits.target, test_size=0.2, random_state=0
)
# Each rank trains on every size-th image; all on equally many, so that all take as many steps.
x_shard, y_shard = (data[: len(data) // size * size][rank::size] for data in (x_train, y_train))

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
learning_rate = 1e-3 * size
model.compile(
    kr.DistributedOptimizer(keras.optimizers.Adam(learning_rate)),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(
    x_shard,
    y_shard,
    batch_size=32,
    epochs=15,
    callbacks=[
        kr.callbacks.BroadcastInitialWeights(),
        kr.callbacks.MetricAverage(),
        kr.callbacks.LearningRateWarmup(learning_rate, warmup_epochs=3),
    ],
)

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
same = len(set(kr.allgather_object(digest))) == 1
if rank == 0:
    print(f"test accuracy: {accuracy:.4f}")
    print(f"all {size} ranks hold the same weights: {'yes' if same else 'NO'} ({digest[:16]})")
