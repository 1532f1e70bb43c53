"""A training that is slow on one rank: its timelines say so, while it runs and after a crash."""

from __future__ import annotations

import json
import signal

from keras_ring.launch.cli import main

SLOW = """
import keras, numpy as np
import time
import keras_ring as kr

kr.init()

class Sleeps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if kr.rank() == 1:
            time.sleep(0.02)
        if batch == 40 and kr.rank() == 0:
            print("far enough", flush=True)

model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile(kr.DistributedOptimizer("adam"), "mse")
x, y = np.ones((NUM_ROWS, 32)), np.ones((NUM_ROWS, 1))
model.fit(x, y, batch_size=4, verbose=0, callbacks=[Sleeps()])
"""


def test_the_report_of_a_training_names_the_slow_rank_and_its_steps(mpirun, tmp_path, capsys):
    env = {"KERAS_RING_TIMELINE": str(tmp_path)}
    mpirun(3, SLOW.replace("NUM_ROWS", "240"), env=env, timeout=90).assert_ok()

    assert main(["report", str(tmp_path)]) == 0

    output = capsys.readouterr().out
    assert "3 ranks on 1 host" in output
    assert "Rank 1 on host " in output
    assert "there were 59." in output  # 60 steps have 59 times between them
    assert "Time of a step" in (tmp_path / "report.html").read_text()


def test_timelines_of_a_training_that_was_killed_make_one_trace(mpirun, tmp_path, capsys):
    env = {"KERAS_RING_TIMELINE": str(tmp_path)}
    job = mpirun.start(2, SLOW.replace("NUM_ROWS", "40000"), env=env)
    job.wait_for_output("far enough", 60)
    job.signal_rank(0, signal.SIGKILL)
    job.signal_rank(1, signal.SIGKILL)
    job.wait(30)

    assert main(["timeline", "merge", str(tmp_path)]) == 0

    assert "2 timelines" in capsys.readouterr().out
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    for rank in (0, 1):
        assert len([e for e in events if e["ph"] == "X" and e["pid"] == rank]) >= 30
