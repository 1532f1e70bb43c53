"""Ranks of one host that cannot share memory: a warning, MPI instead, and right values."""

from __future__ import annotations

import os
import subprocess

import pytest

PROGRAM = """
import numpy as np
import keras_ring as kr
kr.init()
n = kr.size()
rows = np.concatenate([np.full(r + 1, r) for r in range(n)])
for elems in (1, 1000, 3_000_000):
    total = kr.allreduce(np.arange(elems, dtype="float32") + kr.rank(), "sum").numpy()
    expected = n * np.arange(elems, dtype="float32") + n * (n - 1) / 2
    np.testing.assert_array_equal(total, expected)
np.testing.assert_array_equal(kr.allgather(np.full(kr.rank() + 1, kr.rank())), rows)
np.testing.assert_array_equal(kr.broadcast(np.full(5, kr.rank()), n - 1), np.full(5, n - 1))
assert kr.local_size() == n
print("all right", flush=True)
"""
WARNING = "cannot share memory with the ranks of its host"


def in_shell(script: str) -> list[str]:
    """Arguments that make mpirun start each rank through a shell."""
    return ["bash", "-c", f'{script}; exec "$@"', "bash"]


def can_unshare(*options: str) -> bool:
    command = ["unshare", *options, "true"]
    return os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0


def test_memory_that_the_system_refuses_is_done_without(mpirun) -> None:
    result = mpirun(2, PROGRAM, mpirun_args=in_shell("ulimit -f 100"), timeout=90)

    result.assert_ok().assert_no_orphans()
    assert result.stdout.count("all right") == 2
    (warning,) = [line for line in result.stderr.splitlines() if WARNING in line]
    assert "ftruncate" in warning
    assert "File too large" in warning
    assert "go through MPI" in warning


@pytest.mark.skipif(not can_unshare("--pid", "--fork"), reason="needs root to make PID namespaces")
def test_ranks_in_pid_namespaces_of_their_own_go_through_mpi(mpirun) -> None:
    """As where each rank has its container: process ids of others mean nothing there."""
    namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # Open MPI's own shared memory crashes here.
    tcp = ["--mca", "btl", "self,tcp"]

    result = mpirun(2, PROGRAM, mpirun_args=[*tcp, *namespaces], timeout=90)

    result.assert_ok().assert_no_orphans()
    assert result.stdout.count("all right") == 2
    assert f"{WARNING} (it lives in another PID namespace than rank 0)" in result.stderr


@pytest.mark.skipif(not can_unshare("--mount"), reason="needs root to mount")
@pytest.mark.parametrize("size", ["16k", "missing"])
def test_dev_shm_is_not_needed(size: str, mpirun) -> None:
    """The arena is anonymous memory; Open MPI does with what it finds."""
    mount = f"mount -t tmpfs -o size={'16k,ro' if size == 'missing' else size} tmpfs /dev/shm"
    namespace = ["unshare", "--mount", *in_shell(mount)]

    result = mpirun(2, PROGRAM, mpirun_args=namespace, timeout=90)

    result.assert_ok().assert_no_orphans()
    assert result.stdout.count("all right") == 2
    assert WARNING not in result.stderr
