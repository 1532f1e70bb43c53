"""Ranks that take unequal numbers of steps: an error on every rank that says who is missing."""

from __future__ import annotations

import re

import pytest

FIT = """
import keras, numpy as np, tensorflow as tf
import keras_ring as kr

kr.init()
rank = kr.rank()
num_batches = {batches}[rank]
x, y = np.ones((4 * num_batches, 3), "float32"), np.ones((4 * num_batches, 1), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="last")])
model.compile(kr.DistributedOptimizer("sgd"), "mse")

class StopOne(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = {stops} and rank == 1 and batch == 1

try:
    model.fit(x, y, batch_size=4, callbacks=[StopOne(), kr.callbacks.MetricAverage()])
except (kr.StallError, tf.errors.OpError) as error:
    error = kr.errors.from_tf(error) if isinstance(error, tf.errors.OpError) else error
    print(f"rank {{rank}}: {{type(error).__name__}}: {{error}}", flush=True)
print(f"rank {{rank}}: goes on {{kr.allreduce([1.0], 'sum', name='after').numpy()}}", flush=True)
"""


@pytest.mark.parametrize(
    "batches, stops, waiting",
    [([5, 3, 3], False, [0]), ([4, 4, 4], True, [0, 2])],
    ids=["unequal data", "one rank stops"],
)
def test_ranks_with_unequal_steps_end_in_an_error_that_names_who_is_missing(
    mpirun, batches, stops, waiting
) -> None:
    """Cases A3 and A4: the ranks with a batch more wait for gradients, the others for metrics."""
    result = mpirun(
        3,
        FIT.format(batches=batches, stops=stops),
        env={"KERAS_RING_STALL_S": "1", "KERAS_RING_STALL_ERROR_S": "3"},
        timeout=60,
    ).assert_ok()
    output = result.output
    for rank in range(3):
        missing = [r for r in range(3) if (r in waiting) != (rank in waiting)]
        names = ", ".join(map(str, missing))
        # Rank 0's progress bar may stand before it in its line.
        assert re.search(rf"rank {rank}: StallError: .*missing ranks: {names};", output)
        assert f"rank {rank}: goes on [3.]" in output
    assert re.search(rf"rank {waiting[0]}: StallError: allreduce '\S*last/", output)
