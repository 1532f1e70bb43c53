"""A training loop of one's own in a RingStrategy, on as many ranks as mpirun starts.

mpirun -np 2 python examples/custom_loop.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_ring as kr

kr.init()
keras.utils.set_random_seed(0)
BATCH = 60  # rows of the joint batch, of which each rank takes its part

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(
    digits.data.astype("float32") / 16.0, digits.target, test_size=0.2, random_state=0
)

strategy = kr.RingStrategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train))
train = strategy.experimental_distribute_dataset(train.batch(BATCH, drop_remainder=True))
test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(BATCH)
test = strategy.experimental_distribute_dataset(test)


def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_on(batch):
    return strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)


@tf.function
def test_on(batch):
    strategy.run(lambda x, y: accuracy.update_state(y, model(x)), args=batch)


for epoch in range(20):
    losses = [train_on(batch) for batch in train]
    if kr.rank() == 0:
        print(f"epoch {epoch + 1}: loss {tf.reduce_mean(losses):.4f}")
for batch in test:
    test_on(batch)
result = accuracy.result()  # counts the rows of all ranks
if kr.rank() == 0:
    print(f"test accuracy: {result:.4f}")
