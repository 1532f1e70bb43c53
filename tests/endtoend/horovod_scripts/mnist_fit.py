"""A Keras script as Horovod's users write it, on handwritten digits."""

import sys

import tensorflow as tf
from sklearn.datasets import load_digits

import keras_ring.horovod.tensorflow.keras as hvd

hvd.init()

digits = load_digits()
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(digits.images[..., tf.newaxis] / 16.0, tf.float32),
        tf.cast(digits.target, tf.int64),
    )
)
dataset = dataset.repeat().shuffle(2000, seed=hvd.rank()).batch(64)

model = tf.keras.Sequential(
    [
        tf.keras.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"]
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
]
history = model.fit(
    dataset,
    steps_per_epoch=int(sys.argv[1]) // (4 * hvd.size()),
    callbacks=callbacks,
    epochs=4,
    verbose=0,
)
if hvd.rank() == 0:
    print(f"mnist_fit: accuracy {history.history['accuracy'][-1]:.4f}")
