"""Run a function on several ranks, from a script or a notebook."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from keras_ring.errors import LaunchError
from keras_ring.launch import channel
from keras_ring.launch.environment import current, rank_of
from keras_ring.launch.job import Job, Options

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    network_interface: str | None = None,
    env: Mapping[str, str] | None = None,
    prefix_output: bool = False,
) -> list[T]:
    """Call a function on each of several new ranks, and return what each returns.

    The function and its arguments are pickled by cloudpickle, so it may be a lambda or one that is
    defined in a notebook. It calls `kr.init()` itself, as a script would.

    Args:
        fn: The function.
        args: Its positional arguments, the same on every rank.
        kwargs: Its keyword arguments. Defaults to none.
        np: How many ranks. Defaults to None: as many as the hosts have slots.
        hosts: Such as `"h1:2,h2:2"`. Defaults to None: what `hostfile`, Slurm or PBS says, or else
            this host.
        hostfile: A file of hosts, one a line, such as `h1 slots=2`.
        network_interface: The network interface for all traffic. Defaults to what MPI chooses.
        env: Environment variables of the ranks, beside those of this process.
        prefix_output: Whether each line that a rank prints begins with its number.

    Returns:
        What the function returned, in rank order; each must pickle.

    Raises:
        LaunchError: The ranks cannot be started, or a rank failed: with its traceback. The other
            ranks have been ended then.

    Cost: a new process for each rank, each of which imports what the function needs.
    """
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise LaunchError(f"kr.run: {fn!r} or its arguments do not pickle: {error}") from error
    results: dict[int, bytes] = {}
    lock = threading.Lock()

    def answer(message: Any) -> Any:
        if message["kind"] == "call":
            return call
        with lock:
            results[message["rank"]] = message["result"]
        return None

    job = Job(
        [sys.executable, "-m", __name__],
        Options(
            num_ranks=np,
            hosts=hosts,
            hostfile=None if hostfile is None else Path(hostfile),
            network_interface=network_interface,
            prefix_output=prefix_output,
            environment={**_import_path(), **(env or {})},
        ),
        answer,
    )
    status = job.run()
    if job.was_interrupted:
        raise KeyboardInterrupt
    if job.first_failure is not None:
        raise LaunchError(f"kr.run: {job.first_failure}")
    missing = [rank for rank in range(job.num_ranks) if rank not in results]
    if status != 0 or missing:
        raise LaunchError(
            f"kr.run: mpirun ended with status {status}, and no result of ranks {missing}; what it "
            "printed says why."
        )
    # What came belongs to this job: a rank has to know its secret.
    return [pickle.loads(results[rank]) for rank in range(job.num_ranks)]


def main() -> int:
    """Be one rank: fetch the function, call it, and send back what it returns."""
    environment = current()
    fn, args, kwargs = pickle.loads(channel.ask(environment, {"kind": "call"}))
    result = fn(*args, **kwargs)
    try:
        pickled = cloudpickle.dumps(result)
    except Exception:  # noqa: BLE001 - whatever pickling raises
        traceback.print_exc()
        print(f"kr.run: the result {type(result).__name__} does not pickle", file=sys.stderr)
        return 1
    rank = rank_of(environment)
    channel.ask(environment, {"kind": "result", "rank": rank, "result": pickled})
    return 0


def _import_path() -> dict[str, str]:
    """Let the ranks find the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


if __name__ == "__main__":
    sys.exit(main())
