"""A world of one: a process that no launcher has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring import runtime

LAUNCHER_VARIABLES = tuple(
    name for name in os.environ if name.startswith(("OMPI_COMM", "PMIX_", "PMI_"))
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name)
    kr.init()
    yield
    kr.shutdown()


def run_alone(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_before_init_every_question_names_init() -> None:
    for question in (kr.rank, kr.size, kr.local_rank, kr.local_size, kr.node_rank, kr.num_nodes):
        with pytest.raises(kr.ConfigError, match=r"call keras_ring\.init\(\) first"):
            question()
    assert not kr.is_initialized()


def test_process_alone_is_rank_0_of_1(alone: None) -> None:
    assert kr.is_initialized()
    assert (kr.rank(), kr.size()) == (0, 1)
    assert (kr.local_rank(), kr.local_size()) == (0, 1)
    assert (kr.node_rank(), kr.num_nodes()) == (0, 1)


def test_collectives_of_one_return_their_input(alone: None) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    for op in ("mean", "sum", "min", "max", "product"):
        np.testing.assert_array_equal(kr.allreduce(x, op), x)
    np.testing.assert_array_equal(kr.allgather(x), x)
    np.testing.assert_array_equal(kr.broadcast(x), x)
    np.testing.assert_array_equal(tf.function(kr.allreduce)(x), x)
    np.testing.assert_array_equal(kr.allreduce(x, "sum", prescale_factor=2.0), 2.0 * x)
    kr.barrier()
    assert kr.broadcast_object("me") == "me"
    assert kr.allgather_object("me") == ["me"]


def test_hook_runs_at_every_init(alone: None) -> None:
    calls = []

    runtime.on_init(lambda: calls.append(kr.size()))
    assert calls == [1]
    kr.shutdown()
    kr.init()

    assert calls == [1, 1]
    runtime._runtime.hooks.pop()


def test_wrong_configuration_is_refused_by_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_RING_STALL_S", "soon")

    with pytest.raises(kr.ConfigError, match="KERAS_RING_STALL_S is 'soon'; expected a number"):
        kr.init()

    assert not kr.is_initialized()


def test_process_alone_ends_quietly_and_needs_no_mpi4py() -> None:
    result = run_alone(
        "import sys; sys.modules['mpi4py'] = None\n"
        "import keras_ring as kr; kr.init(); print(kr.allreduce([1.0]).numpy())"
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "[1.]\n"
    assert "keras_ring" not in result.stderr


def test_process_alone_that_raises_shows_its_traceback() -> None:
    result = run_alone("import keras_ring as kr; kr.init(); raise ValueError('b')")

    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("ValueError: b")


def test_launcher_of_another_mpi_is_noticed() -> None:
    """Else each of four processes would train by itself without a word."""
    result = run_alone("import keras_ring as kr; kr.init()", PMI_SIZE="4", PMI_RANK="1")

    assert result.returncode == 1
    assert (
        "ConfigError: init: the launcher says that it started 4 processes, but MPI" in result.stderr
    )
    assert "sees 1. The mpirun comes from another MPI than mpi4py uses." in result.stderr


def test_thread_level_that_is_too_low_is_refused() -> None:
    result = run_alone(
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI\n"
        "import keras_ring as kr; kr.init(MPI.COMM_WORLD)",
        OMPI_ALLOW_RUN_AS_ROOT="1",
    )

    assert result.returncode == 1
    assert "ConfigError: MPI was initialised with a thread level below MPI_THREAD_MULTIPLE" in (
        result.stderr
    )
    assert "Let keras_ring.init() initialise MPI" in result.stderr
