"""Train on handwritten digits in a RingStrategy's scope, on as many ranks as mpirun starts.

mpirun -np 2 python examples/strategy_fit.py
"""

import hashlib

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_ring as kr

kr.init()
keras.utils.set_random_seed(0)

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    digits.images[..., None] / 16.0, digits.target, test_size=0.2, random_state=0
)

with kr.RingStrategy().scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

# From here on as in one process: all data on every rank, and the size of the joint batch.
model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=12,
    validation_split=0.1,
    callbacks=[keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)],
)
accuracy = (model.predict(x_test, verbose=0).argmax(axis=-1) == y_test).mean()

digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
same = len(set(kr.allgather_object(digest))) == 1
if kr.rank() == 0:
    print(f"test accuracy: {accuracy:.4f}")
    print(f"all {kr.size()} ranks hold the same weights: {'yes' if same else 'NO'}")
