"""A job that is killed while it writes a checkpoint leaves the old file or the new one, whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_ring.callbacks import checkpoint_file
from keras_ring.callbacks.checkpoint_file import Content

fork = multiprocessing.get_context("fork")


def content(number: int) -> Content:
    return Content({"number": number}, {f"v{i}": np.full(50_000, number) for i in range(8)})


def number_in(path: Path) -> int:
    """Return the number of which the whole file is."""
    found = checkpoint_file.read(path)
    assert found is not None
    number: int = found.state["number"]
    assert all((array == number).all() for array in found.arrays.values())
    return number


def killed_after(path: Path, delay_s: float) -> None:
    def write_on() -> None:
        for number in range(1, 1_000_000):
            checkpoint_file.write(path, content(number))

    child = fork.Process(target=write_on)
    child.start()
    time.sleep(delay_s)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_killed_at_any_moment_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    checkpoint_file.write(path, content(0))
    moments = random.Random(1)
    seen = set()
    for _ in range(30):
        killed_after(path, moments.uniform(0.005, 0.05))
        seen.add(number_in(path))
    assert len(seen) > 3
    assert {p.name for p in tmp_path.iterdir()} <= {"state.npz", "state.npz.partial"}


@pytest.mark.parametrize(
    "step, expected", [("before fsync", 0), ("after fsync", 0), ("after rename", 1)]
)
def test_killed_between_the_steps_the_old_or_the_new_file_is_there(
    step: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.npz"
    checkpoint_file.write(path, content(0))
    fsync, replace = os.fsync, Path.replace

    def die(plain: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(*arguments: Any) -> None:
            if plain is not None:
                plain(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    hooks = {
        "before fsync": (os, "fsync", die(None)),
        "after fsync": (os, "fsync", die(fsync)),
        "after rename": (Path, "replace", die(replace)),
    }
    monkeypatch.setattr(*hooks[step])
    child = fork.Process(target=checkpoint_file.write, args=(path, content(1)))
    child.start()
    child.join()
    monkeypatch.undo()
    assert child.exitcode == -signal.SIGKILL
    assert number_in(path) == expected
    checkpoint_file.write(path, content(2))
    assert number_in(path) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["state.npz"]


TRAIN = """
import sys
import keras, numpy as np
import keras_ring as kr

kr.init()
epochs = int(sys.argv[2])
model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300), keras.layers.Dense(1)])
model.compile(kr.DistributedOptimizer("adam"), "mse")
x, y = np.ones((8, 300), "float32"), np.ones((8, 1), "float32")
begins = keras.callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs=None: print(f"rank {kr.rank()}: epoch {epoch}", flush=True))
model.fit(x, y, batch_size=2, epochs=epochs, verbose=0,
          callbacks=[kr.callbacks.Checkpoint(sys.argv[1], every=1), begins])
print(f"rank {kr.rank()}: steps {int(model.optimizer.iterations)}", flush=True)
"""


def test_a_job_that_was_killed_goes_on_when_it_is_started_again(
    mpirun: Any, tmp_path: Path
) -> None:
    program, path = tmp_path / "train.py", tmp_path / "state.npz"
    program.write_text(TRAIN)
    job = mpirun.start(2, [program, str(path), "100000"])
    job.wait_for_output("rank 0: epoch 5\n")
    job.kill()
    found = checkpoint_file.read(path)
    assert found is not None
    epoch = found.state["epoch"]
    assert epoch >= 4
    result = mpirun(2, [program, str(path), str(epoch + 2)], timeout=60).assert_ok()
    begun = result.stdout.partition("rank 1: epoch ")[2].splitlines()[0]
    assert int(begun) == epoch
    assert result.stdout.count(f"steps {4 * (epoch + 2)}") == 2
