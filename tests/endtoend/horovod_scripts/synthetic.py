"""A benchmark on random images as Horovod's users write it."""

import timeit

import numpy as np
import tensorflow as tf

import keras_ring.horovod.tensorflow as hvd

hvd.init()

model = tf.keras.applications.MobileNet(
    weights=None, input_shape=(32, 32, 3), classes=10, alpha=0.25
)
optimizer = tf.optimizers.SGD(0.01)
data = tf.random.uniform([8, 32, 32, 3])
target = tf.random.uniform([8, 1], minval=0, maxval=9, dtype=tf.int64)
compression = hvd.Compression.fp16


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.losses.SparseCategoricalCrossentropy()(target, probs)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)


benchmark_step(first_batch=True)
rates = [
    8 * 3 / timeit.timeit(lambda: benchmark_step(first_batch=False), number=3) for _ in range(2)
]
weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
same = len({w.tobytes() for w in hvd.allgather_object(weights)}) == 1
total = hvd.allreduce(np.mean(rates), op=hvd.Sum, name="rates")
if hvd.rank() == 0:
    print(f"synthetic: {float(total):.1f} images/s on {hvd.size()} ranks, weights alike: {same}")
