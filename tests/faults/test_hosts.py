"""Several hosts (network namespaces): the results are right, and a lost rank is noticed on all."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NOTICED_WITHIN_S = 10.0

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
imitation = importlib.import_module("hosts")
sys.path.pop(0)

WHY_NOT = imitation.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are hosts")

# Every size takes another way: in one step between the leaders, in rings, and in several windows.
COLLECTIVES = """
    import numpy as np
    import keras_ring as kr

    kr.init()
    rank, size = kr.rank(), kr.size()
    print(f"HOST {kr.node_rank()} of {kr.num_nodes()}, {kr.local_rank()} of {kr.local_size()}")
    for elems in (1, 1000, 100_000, 3_000_000):
        own = np.arange(elems, dtype=np.int64) * size + rank
        total = kr.allreduce(own, "sum", name=f"sum{elems}").numpy()
        expected = np.arange(elems, dtype=np.int64) * size * size + size * (size - 1) // 2
        np.testing.assert_array_equal(total, expected)
        for root in range(size):
            sent = kr.broadcast(own, root_rank=root, name=f"from{root}_{elems}").numpy()
            np.testing.assert_array_equal(sent, np.arange(elems, dtype=np.int64) * size + root)
        rows = elems // 10 * rank
        blocks = kr.allgather(np.full((rows, 2), rank, np.int32), name=f"all{elems}").numpy()
        ranks = np.repeat(np.arange(size, dtype=np.int32), elems // 10 * np.arange(size))
        np.testing.assert_array_equal(blocks, np.stack([ranks, ranks], axis=1))
    print("RIGHT")
    kr.shutdown()
"""

# A host's leader is killed in the middle of large transfers; the others wait for each other with
# their end, because the first to end takes the job with it.
LOST = """
    import os, time
    import numpy as np
    import keras_ring as kr

    kr.init()
    values = np.ones(8_000_000, np.float32)
    try:
        for step in range(100_000):
            kr.allreduce(values, name="weights")
            if step == 3:
                print("RUNNING", flush=True)
    except kr.PeerLostError as error:
        print(f"NOTICED {time.time()} {error}", flush=True)
    open(f"FOLDER/{kr.rank()}", "w").close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and len(os.listdir("FOLDER")) < kr.size() - 1:
        time.sleep(0.05)
    os._exit(1)
"""


@pytest.fixture
def start(mpirun) -> Iterator:
    """Start a program with so many ranks on each of three hosts."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(imitation.hosts(3))

        def on_hosts(ranks: tuple[int, ...], program: str, *options: str):
            before, after = stack.enter_context(imitation.launcher(made, ranks))
            arguments = [*after, *options]
            return mpirun.start(sum(ranks), program, before=before, mpirun_args=arguments)

        yield on_hosts
        mpirun.kill_all()  # before its hosts go


@pytest.mark.parametrize("ranks", [(2, 2, 2), (2, 1, 3)], ids=["equal", "unequal"])
def test_collectives_between_hosts_are_right(start, ranks) -> None:
    result = start(ranks, COLLECTIVES).wait(200)

    result.assert_ok()
    assert result.stdout.count("RIGHT") == sum(ranks)
    assert len(set(re.findall(r"HOST .*", result.stdout))) == sum(ranks), result.stdout


def test_leader_killed_on_one_host_is_noticed_on_the_others(start, tmp_path) -> None:
    folder = tmp_path / "ended"
    folder.mkdir()
    job = start((1, 3, 1), LOST.replace("FOLDER", str(folder)), "--with-ft", "ulfm")
    job.wait_for_output("RUNNING", 200)
    killed_at = time.time()
    job.signal_rank(1, signal.SIGKILL)

    result = job.wait(60)

    result.assert_no_orphans()
    assert result.returncode != 0
    noticed = re.findall(r"NOTICED ([\d.]+) (.*)", result.stdout)
    assert len(noticed) == 4, result.output
    for at, _ in noticed:
        assert float(at) - killed_at < NOTICED_WITHIN_S, result.output
