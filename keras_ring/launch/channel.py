"""How ranks on any host report to the process that started them: messages over TCP.

Messages are Python objects, pickled. Whoever does not know the job's secret is not listened to, so
nobody else's pickle is ever read.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError, connection
from typing import Any

from keras_ring.errors import LaunchError
from keras_ring.launch.environment import REPORT_KEY, REPORT_TO

_BACKLOG = 128


class Listener:
    """Receives the messages of a job's ranks, each in a thread of its connection.

    Args:
        address: The address of this host under which the ranks reach it.
        answer: Called with each message; what it returns is sent back. Several threads call it.
    """

    def __init__(self, address: str, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._key = secrets.token_bytes(32)
        try:
            self._listener = connection.Listener((address, 0), "AF_INET", backlog=_BACKLOG)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {address} for what the ranks report: {error}. Choose an "
                "interface of this host by --network-interface."
            ) from error
        self._address = address
        self._open: set[connection.Connection[Any, Any]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="keras-ring reports", daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which a rank finds this listener."""
        port = self._listener.address[1]
        return {REPORT_TO: f"{self._address}:{port}", REPORT_KEY: self._key.hex()}

    def close(self) -> None:
        """Listen no longer, and end all connections."""
        with self._lock:
            self._is_closed = True
            left = list(self._open)
        self._listener.close()
        for one in left:
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        while True:
            try:
                # Without a key here: a stranger that is silent must not keep the others waiting.
                one = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            with self._lock:
                self._open.add(one)
            threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: connection.Connection[Any, Any]) -> None:
        try:
            connection.deliver_challenge(one, self._key)
            connection.answer_challenge(one, self._key)
            while True:
                one.send(self._answer(one.recv()))
        except (EOFError, OSError, AuthenticationError):
            pass
        finally:
            with self._lock:
                self._open.discard(one)
            one.close()


def ask(environment: Mapping[str, str], message: Any) -> Any:
    """Send a message to the process that started this rank, and return its answer.

    Args:
        environment: This rank's variables, with those of `Listener.variables`.
        message: Any object that pickles.

    Raises:
        OSError: That process is not there any more, or cannot be reached.
        EOFError: It went while it was asked.
    """
    host, _, port = environment[REPORT_TO].rpartition(":")
    key = bytes.fromhex(environment[REPORT_KEY])
    with connection.Client((host, int(port)), "AF_INET") as one:
        connection.answer_challenge(one, key)
        connection.deliver_challenge(one, key)
        one.send(message)
        return one.recv()
