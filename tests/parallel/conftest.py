"""Every rank runs the same pytest session: `mpirun -np N python -m pytest tests/parallel`.

Rank 0 reports to the terminal. The other ranks write their reports to files, which rank 0 shows
when they have failed, and rank 0's exit status covers all of them. The ranks are kept in step
through files and not through keras_ring: a test that fails on one rank alone must not leave the
others out of step with it, and then a collective of keras_ring is just what does not work.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

# A rank that fails leaves the others waiting for it: reported after the first time, and after the
# second one their test fails too and the next one can begin.
os.environ.setdefault("KERAS_RING_STALL_S", "5")
os.environ.setdefault("KERAS_RING_STALL_ERROR_S", "40")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

TEST_TIMEOUT_S = 120
# Longer than a test may take: the rank that comes last may be in one that fails by timeout.
STEP_TIMEOUT_S = TEST_TIMEOUT_S + 30
SHOWN_LINES = 150


def _from_environment(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


RANK = _from_environment(("OMPI_COMM_WORLD_RANK", "PMI_RANK"), 0)
SIZE = _from_environment(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), 1)
ALL_RANKS = range(SIZE)


class Meeting:
    """A folder in which the ranks of one mpirun leave notes for each other.

    All ranks are on one host, children of the same mpirun; its process id and start time name it.
    """

    def __init__(self, parent_folder: Path) -> None:
        parent = os.getppid()
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        self.folder = parent_folder / f"{parent}-{started}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._num_steps = 0

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def step(self, label: str) -> list[str]:
        """Wait until every rank has made this step; return their labels in rank order."""
        self._num_steps += 1
        name = f"step{self._num_steps}"
        self._leave_note(name, label)
        missing = self._wait_for(name, ALL_RANKS, unless="end")
        if missing:
            pytest.exit(f"rank {RANK}: ranks {missing} did not come to {label!r}", returncode=1)
        return [json.loads(self._note(name, rank).read_text()) for rank in ALL_RANKS]

    def leave(self) -> None:
        """Wait until all sessions have ended; rank 0 goes last and removes the folder."""
        self._leave_note("end")
        self._wait_for("end", ALL_RANKS)
        self._leave_note("left")
        if RANK == 0:
            self._wait_for("left", ALL_RANKS)
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_of_ended(self, rank: int) -> list[str]:
        """Return the lines that another rank has reported, as soon as its session has ended."""
        self._wait_for("end", [rank])
        return self.log_path(rank).read_text().splitlines()

    def _leave_note(self, name: str, content: str = "") -> None:
        partial = self.folder / f"partial-rank{RANK}"
        partial.write_text(json.dumps(content))
        partial.rename(self._note(name, RANK))

    def _wait_for(self, name: str, ranks: Sequence[int], *, unless: str | None = None) -> list[int]:
        """Wait for notes of `ranks`; return who left none in time, or left `unless` instead."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while missing := [rank for rank in ranks if not self._note(name, rank).exists()]:
            given_up = unless and any(self._note(unless, rank).exists() for rank in missing)
            if given_up or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return missing

    def _note(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}-rank{rank}.json"


class RankReporting:
    """The hooks that make one report of the sessions of all ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self.meeting = Meeting(config.rootpath / "build" / "parallel_tests")
        self._failed_ranks: list[int] = []
        self._log = None
        if RANK != 0:
            plugins = config.pluginmanager
            plugins.unregister(name="terminalreporter")
            self._log = self.meeting.log_path(RANK).open("w", buffering=1)
            plugins.register(pytest.TerminalReporter(config, self._log), "terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """End the session unless all ranks have the same tests in the same order."""
        labels = self.meeting.step("\n".join(item.nodeid for item in session.items))
        different = [rank for rank, label in enumerate(labels) if label != labels[0]]
        if different:
            pytest.exit(f"ranks {different} collected other tests than rank 0", returncode=1)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Tell rank 0 how the session went on the others; its exit status covers them."""
        statuses = [int(status) for status in self.meeting.step(str(int(exitstatus)))]
        self._failed_ranks = [rank for rank, status in enumerate(statuses) if status != 0]
        if RANK != 0:
            session.exitstatus = pytest.ExitCode.OK
        elif self._failed_ranks and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what the ranks that failed have reported."""
        if RANK == 0:
            for rank in self._failed_ranks:
                if rank != 0:
                    terminalreporter.section(f"rank {rank} of {SIZE} failed")
                    lines = self.meeting.log_of_ended(rank)
                    for line in lines[-SHOWN_LINES:]:
                        terminalreporter.write_line(f"rank {rank} | {line}")

    @pytest.hookimpl(trylast=True)  # after the terminal reporter's last words
    def pytest_unconfigure(self) -> None:
        """End together: mpirun kills the other ranks as soon as one has failed."""
        if self._log is not None:
            self._log.close()
        sys.stdout.flush()
        self.meeting.leave()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stress", "random collectives (test_stress.py)")
    group.addoption("--stress-requests", type=int, help="how many")
    group.addoption("--stress-seed", type=int, help="which (drawn anew each time)")


@pytest.hookimpl(trylast=True)  # after pytest has made its own terminal reporter
def pytest_configure(config: pytest.Config) -> None:
    # When mpirun stops the ranks, each says where it was, on the stderr that is not captured.
    stderr = config.stash.get(fault_handler_stderr_fd_key, 2)
    faulthandler.register(signal.SIGTERM, file=stderr, all_threads=True, chain=True)
    config.pluginmanager.register(RankReporting(config), "rank_reporting")


def pytest_report_header() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"rank {RANK} of {SIZE}, {name} {'.'.join(map(str, version))}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test a time limit that holds in C++ too, and that prints all threads' stacks."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, method="thread"))


@pytest.fixture(scope="session", autouse=True)
def _world() -> Iterator[None]:
    import keras_ring as kr

    kr.init()
    _load_keras()
    # What the session keeps need not be gone through after each test.
    gc.collect()
    gc.freeze()
    yield
    if kr.is_initialized():
        kr.shutdown()


def _load_keras() -> None:
    import keras

    keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]).compile("sgd", "mse")


@pytest.fixture(autouse=True)
def _ranks_in_step(request: pytest.FixtureRequest, _world: None) -> Iterator[None]:
    """Begin each test on all ranks at once, in an initialised world.

    No garbage is left for a later test. To destroy an iterator of tf.data may take TensorFlow as
    long as the iterator has lived, at most a minute: its autotuning thread misses that it is
    cancelled and sleeps on. A rank that came upon an old one would keep the others waiting.
    """
    import keras_ring as kr

    request.config.pluginmanager.get_plugin("rank_reporting").meeting.step(request.node.nodeid)
    if not kr.is_initialized():
        kr.init()
    yield
    gc.collect()
