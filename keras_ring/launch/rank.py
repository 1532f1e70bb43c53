"""Run one rank's program: started by `mpirun` as `python -m keras_ring.launch.rank`.

It passes on what the program prints, and tells the process that started the job how the program has
ended. The program never outlives it, and it never outlives its launcher.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from keras_ring.launch import channel
from keras_ring.launch.environment import REPORT_TO, current, rank_of

PREFIX = "--prefix-output"
# How much of what a program prints last is reported.
_TAIL_BYTES = 32 << 10
_CHUNK_BYTES = 64 << 10
_PARENT_POLL_S = 0.5
# After SIGTERM a program may print and save for so long, if MPI's launcher lets it.
_END_GRACE_S = 5.0
_DRAIN_S = 0.5
# The answer comes when the other ranks have ended or have had their time to.
_REPORT_S = 15.0


class _Stream:
    """Passes on what a program writes, and keeps its last bytes."""

    def __init__(self, target: int, prefix: bytes) -> None:
        self._target = target
        self._prefix = prefix
        self._line = b""
        self._kept: collections.deque[bytes] = collections.deque()
        self._num_kept = 0

    def write(self, chunk: bytes) -> None:
        """Pass on what has come."""
        self._kept.append(chunk)
        self._num_kept += len(chunk)
        while self._num_kept - len(self._kept[0]) >= _TAIL_BYTES:
            self._num_kept -= len(self._kept.popleft())
        if not self._prefix:
            _write_all(self._target, chunk)
            return
        *lines, self._line = (self._line + chunk).split(b"\n")
        _write_all(self._target, b"".join(self._prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Pass on a last line that has no end."""
        if self._line:
            _write_all(self._target, self._prefix + self._line + b"\n")

    @property
    def tail(self) -> str:
        """What came last, up to 32 KiB."""
        return b"".join(self._kept)[-_TAIL_BYTES:].decode(errors="replace")


class _Rank:
    """The program of this rank, while it runs."""

    def __init__(self, program: Sequence[str], is_prefixed: bool) -> None:
        environment = current()
        self._rank = rank_of(environment)
        prefix = f"[{self._rank}] ".encode() if is_prefixed else b""
        self._parent = os.getppid()
        self._stopped_at: float | None = None
        # Before the program starts: a signal that comes then must reach it, too.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        # Found before fork, after which a program of several threads may load nothing.
        prctl = ctypes.CDLL(None, use_errno=True).prctl

        def begin() -> None:
            # A group of its own: what mpirun sends to this one comes here alone.
            os.setpgid(0, 0)
            # PR_SET_PDEATHSIG: it dies with this process, even if that is killed.
            prctl(1, signal.SIGKILL, 0, 0, 0)

        self._process = subprocess.Popen(
            program,
            stdin=None,
            stdout=subprocess.PIPE if is_prefixed else None,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=begin,
        )
        self.errors = _Stream(2, prefix)
        self._streams = {self._process.stderr: self.errors}
        if is_prefixed:
            self._streams[self._process.stdout] = _Stream(1, prefix)

    def wait(self) -> int:
        """Pass on its output until its end; return what `Popen.returncode` is."""
        with selectors.DefaultSelector() as selector:
            for pipe, stream in self._streams.items():
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    selector.register(pipe, selectors.EVENT_READ, stream)
            end = os.pidfd_open(self._process.pid)
            try:
                selector.register(end, selectors.EVENT_READ, None)
                while not _pass_on(selector, _PARENT_POLL_S):
                    self._check_limits()
                # Processes that the program has left behind may hold the pipes open.
                deadline = time.monotonic() + _DRAIN_S
                selector.unregister(end)
                while selector.get_map() and time.monotonic() < deadline:
                    if not selector.select(0):
                        break
                    _pass_on(selector, 0)
            finally:
                os.close(end)
        for stream in self._streams.values():
            stream.end()
        # Processes that it has left behind have nobody any more.
        self._signal_group(signal.SIGKILL)
        return self._process.wait()

    def report(self, returncode: int) -> None:
        """Tell the process that started the job how this rank ended, and wait for its answer."""
        message = {
            "kind": "ended",
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": self._process.pid,
            "returncode": returncode,
            "was_stopped": self._stopped_at is not None,
            "tail": self.errors.tail if returncode != 0 else "",
        }

        def send() -> None:
            with contextlib.suppress(OSError, EOFError):
                channel.ask(current(), message)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(_REPORT_S)

    def _stop(self, number: int, _: object) -> None:
        self._stopped_at = self._stopped_at or time.monotonic()
        if hasattr(self, "_process"):
            self._signal_group(signal.Signals(number))

    def _check_limits(self) -> None:
        if os.getppid() != self._parent:
            self._signal_group(signal.SIGKILL)
        if self._stopped_at is not None and time.monotonic() > self._stopped_at + _END_GRACE_S:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program as one rank.

    Args:
        arguments: `--prefix-output` or not, then the program and what it is given. Defaults to
            None: `sys.argv[1:]`.

    Returns:
        Its exit status; 128 and the signal's number if a signal ended it.
    """
    program = list(sys.argv[1:] if arguments is None else arguments)
    is_prefixed = program[:1] == [PREFIX]
    if is_prefixed:
        del program[0]
    try:
        rank = _Rank(program, is_prefixed)
    except OSError as error:
        print(f"keras-ring run: {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    returncode = rank.wait()
    # When a rank exits with an error, mpirun kills the others in half a second, whatever they have
    # still to say. So it does not, until the one that is asked agrees.
    if REPORT_TO in current():
        rank.report(returncode)
    return returncode if returncode >= 0 else 128 - returncode


def _pass_on(selector: selectors.BaseSelector, timeout_s: float) -> bool:
    """Pass on what there is; return whether the program has ended."""
    has_ended = False
    for key, _ in selector.select(timeout_s):
        if key.data is None:
            has_ended = True
            continue
        chunk = os.read(key.fd, _CHUNK_BYTES)
        if chunk:
            key.data.write(chunk)
        else:
            selector.unregister(key.fileobj)
    return has_ended


def _write_all(target: int, data: bytes) -> None:
    # Nobody may read any more; the program goes on nevertheless.
    with contextlib.suppress(BrokenPipeError):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


if __name__ == "__main__":
    sys.exit(main())
