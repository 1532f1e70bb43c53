"""Start the ranks of a job, watch over them, and end all with the first that fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ring.errors import LaunchError
from keras_ring.launch import channel, command, hosts, interfaces, rank
from keras_ring.launch.environment import REPORT_KEY, REPORT_TO, current

# After the first failure the others have so long to say what they have seen, and to end, before
# mpirun learns of it and ends them; twice as long before mpirun is ended.
_OTHERS_S = 5.0
_END_GRACE_S = 8.0
_POLL_S = 0.05
_TAIL_LINES = 30
# What TensorFlow says of itself when it is imported.
_NOISE = re.compile(r"[IW]0000 |WARNING: All log messages before absl::")


@dataclass(frozen=True)
class Failure:
    """How a rank's program ended that did not end well.

    Args:
        rank: Its rank.
        host: The name of its host.
        pid: Its process there.
        returncode: Its exit status; the negative number of a signal that ended it.
        was_stopped: Whether it had been told to end before.
        tail: What it last wrote to stderr.
    """

    rank: int
    host: str
    pid: int
    returncode: int
    was_stopped: bool
    tail: str

    @property
    def status(self) -> int:
        """The exit status of the job."""
        if self.was_stopped and self.traceback:
            return 1  # of Python after an exception, which the signal forestalled
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def traceback(self) -> str:
        """The last traceback that it wrote; empty if there is none."""
        start = self.tail.rfind("Traceback (most recent call last)")
        if start < 0:
            return ""
        # Causes come before, each with a traceback of its own.
        for match in re.finditer(r"\n\n(?:The above|During handling)[^\n]*\n\n", self.tail[:start]):
            before = self.tail.rfind("Traceback (most recent call last)", 0, match.start())
            start = min(start, before) if before >= 0 else start
        return self.tail[start:].rstrip()

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had."""
        return (
            re.search(
                r"^(keras_ring\.errors\.)?(PeerLostError|StallError)\b"
                r"|^tensorflow\.\S*\.(AbortedError|UnavailableError|DeadlineExceededError)\b"
                r"|Its traceback is on that rank\.",
                self.traceback,
                re.M,
            )
            is not None
        )

    def __str__(self) -> str:
        if self.returncode >= 0 or (self.was_stopped and self.traceback):
            how = f"exit status {self.status}"
        else:
            how = f"killed by signal {-self.returncode} ({signal.Signals(-self.returncode).name})"
        lines = [line for line in self.tail.splitlines() if line and not _NOISE.match(line)]
        what = self.traceback or "\n".join(lines[-_TAIL_LINES:])
        text = f"rank {self.rank} (host {self.host}, pid {self.pid}) failed first: {how}"
        return f"{text}\n{what}" if what else f"{text}; it wrote no error"


@dataclass(frozen=True)
class Options:
    """How to start a job.

    Args:
        num_ranks: How many ranks. Defaults to None: as many as the hosts have slots.
        hosts: Such as `"h1:2,h2:2"`. Defaults to None: what `hostfile` or the batch system says,
            or else this host.
        hostfile: A file of hosts.
        network_interface: The network interface for all traffic. Defaults to what MPI chooses.
        prefix_output: Whether each line of output begins with its rank.
        environment: Variables of the ranks beside those of this process.
        forwarded: Names or patterns of variables that ranks on other hosts get beside the usual.
        mpirun_arguments: What `mpirun` gets beside what is said here.
    """

    num_ranks: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    network_interface: str | None = None
    prefix_output: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: Sequence[str] = ()
    mpirun_arguments: Sequence[str] = ()


class Job:
    """One run of a program on all ranks.

    `failures` lists how ranks have failed, in the order in which they reported it, and
    `was_interrupted` is whether Ctrl-C ended the job.

    Args:
        program: The program and its arguments; the same on every rank.
        options: How to start it.
        answer: Called with what ranks ask, other than their failures; returns the answer. Called
            in several threads.

    Raises:
        LaunchError: The options do not fit together or this machine.
    """

    def __init__(
        self,
        program: Sequence[str],
        options: Options,
        answer: Callable[[Any], Any] | None = None,
    ) -> None:
        self.failures: list[Failure] = []
        self._first_failed_at: float | None = None
        self._num_ended = 0
        self._has_ended = threading.Condition()
        self._answer = answer
        self.was_interrupted = False
        chosen = _choose_hosts(options)
        num_ranks = _choose_num_ranks(options.num_ranks, chosen)
        self.num_ranks = num_ranks
        others = [host.name for host in chosen or () if not _is_this(host.name)]
        launcher = command.find_launcher()
        address = interfaces.address_towards(
            others[0] if others else None, options.network_interface
        )
        self._listener = channel.Listener(address, self._receive)
        environment = {**current(), **options.environment, **self._listener.variables}
        wanted = (*options.forwarded, *options.environment, REPORT_TO, REPORT_KEY)
        prefix = [rank.PREFIX] if options.prefix_output else []
        self._command = command.compose(
            launcher,
            num_ranks,
            [*options.mpirun_arguments, sys.executable, "-m", rank.__name__, *prefix, *program],
            hosts=chosen,
            interface=options.network_interface,
            forwarded=command.forwarded_names(environment, wanted) if others else (),
            is_root=os.geteuid() == 0,
        )
        self._environment = environment

    def run(self) -> int:
        """Start the ranks and wait for their end.

        Returns:
            0; or the exit status of the rank that failed first, 128 and the number of the signal
            that killed it; or, if no rank did, that of `mpirun`.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        try:
            process = subprocess.Popen(
                self._command,
                env=self._environment,
                # A group of its own: Ctrl-C comes to this process, which ends the job in order.
                start_new_session=True,
                # PR_SET_PDEATHSIG: mpirun ends the ranks if this process is killed.
                preexec_fn=lambda: prctl(1, signal.SIGTERM, 0, 0, 0),
            )
        except OSError as error:
            self._listener.close()
            raise LaunchError(f"{self._command[0]}: {error.strerror}") from error
        try:
            with self._interrupts_forwarded(process):
                status = self._watch(process)
        finally:
            _end(process)
            self._listener.close()
        if self.was_interrupted:
            return 128 + signal.SIGINT
        first = self.first_failure
        return status if first is None else first.status

    @property
    def first_failure(self) -> Failure | None:
        """The failure that the others followed, as well as can be told."""

        def order(failure: Failure) -> tuple[bool, bool]:
            is_silent = failure.was_stopped and not failure.traceback
            return is_silent, failure.is_consequence

        # `min` takes the first of equals: the one that was reported first.
        return min(self.failures, key=order, default=None)

    def _receive(self, message: Any) -> Any:
        if message["kind"] == "ended":
            named = {name: value for name, value in message.items() if name != "kind"}
            self._note_end(Failure(**named))
            return None
        return None if self._answer is None else self._answer(message)

    def _note_end(self, end: Failure) -> None:
        """Note how a rank has ended, and hold one that has failed until the others have, too."""
        with self._has_ended:
            self._num_ended += 1
            self._has_ended.notify_all()
            if end.returncode == 0:
                return
            self.failures.append(end)
            if end.was_stopped:
                return
            self._first_failed_at = self._first_failed_at or time.monotonic()
            left_s = self._first_failed_at + _OTHERS_S - time.monotonic()
            self._has_ended.wait_for(lambda: self._num_ended == self.num_ranks, max(left_s, 0.0))

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for mpirun's end, and bring it about when the others do not end by themselves."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_S if self._first_failed_at is not None else 0.5)
                return status if status >= 0 else 128 - status
            since = self._first_failed_at
            if since is not None and time.monotonic() > since + 2 * _OTHERS_S:
                return _end(process)

    @contextlib.contextmanager
    def _interrupts_forwarded(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _: object) -> None:
            self.was_interrupted = number == signal.SIGINT
            self._first_failed_at = self._first_failed_at or time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End mpirun, which ends the ranks; they end by themselves if it has to be killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_GRACE_S)
    if process.poll() is None:
        process.kill()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _choose_hosts(options: Options) -> tuple[hosts.Host, ...] | None:
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("-H and --hostfile both name the hosts. Give one of them.")
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return hosts.read_hostfile(options.hostfile)
    return hosts.allocated_hosts(current())


def _choose_num_ranks(wanted: int | None, chosen: Sequence[hosts.Host] | None) -> int:
    if wanted is None and chosen is None:
        raise LaunchError("-np is missing: how many ranks? Such as -np 2; or give hosts by -H.")
    num_ranks = sum(host.slots for host in chosen or ()) if wanted is None else wanted
    if num_ranks < 1:
        raise LaunchError(f"-np {num_ranks}: expected at least 1 rank")
    return num_ranks


def _is_this(name: str) -> bool:
    this = os.uname().nodename
    return name in {"localhost", "127.0.0.1", this, this.partition(".")[0]}
