"""Ranks whose callbacks wait for one another out of turn: an error on every rank, and no hang."""

from __future__ import annotations

import re

# What `fit` itself keeps in step, tests/parallel/test_agreement.py tests. It cannot do so with a
# collective that a user's callback calls on some ranks alone.
FIT = """
import keras, numpy as np, tensorflow as tf
import keras_ring as kr

kr.init()
rank = kr.rank()
x, y = np.ones((12, 3), "float32"), np.ones((12, 1), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="last")])
model.compile(kr.DistributedOptimizer("sgd"), "mse")

class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if rank == 1:
            kr.allreduce([1.0], name="key#mine alone")

try:
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Waits()])
except (kr.StallError, tf.errors.OpError) as error:
    error = kr.errors.from_tf(error) if isinstance(error, tf.errors.OpError) else error
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
print(f"rank {rank}: goes on {kr.allreduce([1.0], 'sum', name='after').numpy()}", flush=True)
"""


def test_a_collective_of_one_ranks_callback_ends_in_an_error_that_names_who_is_missing(
    mpirun,
) -> None:
    result = mpirun(
        3,
        FIT,
        env={"KERAS_RING_STALL_S": "1", "KERAS_RING_STALL_ERROR_S": "3"},
        timeout=60,
    ).assert_ok()
    output = result.output
    for rank in range(3):
        missing = "0, 2" if rank == 1 else "1"
        assert re.search(rf"rank {rank}: StallError: .*missing ranks: {missing};", output), output
        assert f"rank {rank}: goes on [3.]" in output
    assert "rank 1: StallError: allreduce 'mine alone'" in output
