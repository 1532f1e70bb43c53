"""A training that is ended again and again, and goes on with another number of ranks each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Each run ends with an error after some batches, as a job that has run out of time; 4 batches are
# an epoch. Plain Keras trains on the joint batches for comparison.
TRAIN = """
import contextlib, json, sys
import keras, numpy as np
import keras_ring as kr

road, path, stop_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
kr.init()
keras.utils.set_random_seed(4)
x = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
y, batch = x.sum(1, keepdims=True) ** 2, 12

def make():
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers])

adam = keras.optimizers.Adam(0.05)
if road == "strategy":
    with kr.RingStrategy().scope():
        model = make()
        model.compile(keras.optimizers.Adam(0.05), "mse")
else:
    model = make()
    model.compile(kr.DistributedOptimizer(adam) if road == "optimizer" else adam, "mse")
if road == "optimizer":
    batch //= kr.size()
    parts = (part.reshape(4, kr.size(), batch, -1)[:, kr.rank()] for part in (x, y))
    x, y = (part.reshape(4 * batch, -1) for part in parts)

class Ends(keras.callbacks.Callback):
    num_batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_batches += 1
        if self.num_batches == stop_after:
            raise InterruptedError

ends = Ends()
callbacks = [ends] if road == "plain" else [
    kr.callbacks.Checkpoint(path, every=3), kr.callbacks.MetricAverage(), ends]
with contextlib.suppress(InterruptedError):
    model.fit(x, y, batch_size=batch, epochs=3, shuffle=road == "strategy", verbose=0,
              callbacks=callbacks)
    if kr.rank() == 0:
        json.dump(model.history.history, open(path + ".json", "w"))
        np.savez(path + ".weights.npz", *model.get_weights())
print(f"rank {kr.rank()} of {kr.size()} trained {ends.num_batches}", flush=True)
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("road", ["optimizer", "strategy"])
def test_two_then_three_ranks_then_one_train_as_one_process_without_a_break(
    road: str, mpirun: Any, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    whole, path = str(tmp_path / "whole"), str(tmp_path / "run" / "state.npz")
    # Arrays are shuffled in the scope, where every rank draws the same.
    plain = "plain" if road == "optimizer" else "strategy"
    mpirun(0, [program, plain, whole, "0"], timeout=60).assert_ok()

    # Writes after batches 3 and 6 of 12, and from there after 9 and 12.
    result = mpirun(2, [program, road, path, "7"], timeout=60).assert_ok()
    assert result.stdout.count("of 2 trained 7") == 2
    result = mpirun(3, [program, road, path, "5"], timeout=60).assert_ok()
    assert result.stdout.count("of 3 trained 5") == 3
    result = mpirun(0, [program, road, path, "0"], timeout=60).assert_ok()
    assert "of 1 trained 3" in result.stdout

    expected, got = (np.load(f"{name}.weights.npz") for name in (whole, path))
    for name in expected.files:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)
    curves = [json.loads(Path(f"{name}.json").read_text())["loss"] for name in (whole, path)]
    assert len(curves[1]) == 3
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
