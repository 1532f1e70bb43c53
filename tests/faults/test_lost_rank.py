"""A rank raises, exits or is killed: mpirun ends non-zero within seconds, and says why."""

from __future__ import annotations

import re
import signal
import time

import pytest

# From the fault to the end of mpirun and of every process.
END_WITHIN_S = 10.0
PRELUDE = """
import os, signal, sys, time
import keras_ring as kr

def fault(rank=1):
    print(f"FAULT {time.time()}", flush=True)

"""


def program(body: str) -> str:
    lines = body.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return PRELUDE + "\n".join(line[indent:] for line in lines) + "\n"


def run_to_the_end(mpirun, n: int, body: str, timeout: float = 90.0, env=None) -> str:
    """Run a job in which a rank fails; check how it ends and return its output."""
    result = mpirun(n, program(body), timeout=timeout, env=env)
    took_s = time.time() - float(re.search(r"FAULT ([\d.]+)", result.stdout)[1])
    result.assert_no_orphans()
    assert result.returncode != 0, result.output
    assert took_s < END_WITHIN_S, f"took {took_s:.1f} s\n{result.output}"
    return result.output


# Each happens on the last rank after five good steps, while the others wait for it.
FAULTS = {
    "raises": ("raise ValueError('bad sample')", 3, "ValueError: bad sample"),
    "exits": ("sys.exit(3)", 2, ""),
    "exits at once": ("os._exit(4)", 2, ""),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 4, ""),
    "is terminated": ("os.kill(os.getpid(), signal.SIGTERM)", 2, ""),
}


@pytest.mark.parametrize("what", FAULTS)
def test_rank_that(what: str, mpirun) -> None:
    statement, n, traceback = FAULTS[what]

    output = run_to_the_end(
        mpirun,
        n,
        f"""
        kr.init()
        for step in range(100):
            kr.allreduce([float(step)], name="weights")
            if kr.rank() == kr.size() - 1 and step == 5:
                fault()
                {statement}
        """,
    )

    assert traceback in output
    # mpirun may end the others before they can speak: then it is mpirun that names the rank.
    ours = rf"rank {n - 1} \(host .*, pid \d+\) is gone: "
    mpirun_s = rf"(?s)process rank {n - 1}\b|Process name: \[.*,{n - 1}\]"
    assert re.search(ours, output) or re.search(mpirun_s, output), output


def test_rank_that_raises_in_a_callback_of_fit_ends_the_others_fit(mpirun) -> None:
    output = run_to_the_end(
        mpirun,
        2,
        """
        import keras, numpy as np
        kr.init()

        class Fails(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if kr.rank() == 1 and batch == 3:
                    fault()
                    raise ValueError("bad callback")

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(kr.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        model.fit(np.ones((4000, 2)), np.ones((4000, 1)), batch_size=4, callbacks=[Fails()])
        """,
    )

    assert "ValueError: bad callback" in output
    assert (
        "MismatchError: fit: rank 1 failed in a callback when batch 4 ended, so no rank goes on: "
        "ValueError: bad callback. Its traceback is on that rank."
    ) in output


def test_rank_that_raises_while_the_others_compute_ends_them(mpirun) -> None:
    output = run_to_the_end(
        mpirun,
        3,
        """
        kr.init()
        if kr.rank() == 1:
            fault()
            raise ValueError("bad start")
        deadline = time.time() + 60
        while time.time() < deadline:
            sum(range(10_000))
        """,
    )

    assert "ValueError: bad start" in output


def test_rank_that_raises_before_init_ends_those_that_wait_in_init(mpirun) -> None:
    output = run_to_the_end(
        mpirun,
        3,
        """
        if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            time.sleep(1.0)
            fault()
            raise ValueError("no data")
        kr.init()
        """,
    )

    assert "ValueError: no data" in output


def test_interrupt_of_mpirun_ends_everything(mpirun) -> None:
    job = mpirun.start(
        3,
        program("""
        kr.init()
        print("ready", flush=True)
        if kr.rank() == 0:
            time.sleep(60)
        kr.shutdown()
        """),
    )
    job.wait_for_output("ready\nready\nready", 60)
    start = time.monotonic()

    job.process.send_signal(signal.SIGINT)
    result = job.wait(END_WITHIN_S + 5)

    assert time.monotonic() - start < END_WITHIN_S
    assert result.returncode != 0
    result.assert_no_orphans()
