"""Collectives on Python objects."""

import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ring import runtime
from keras_ring.collectives import allgather, broadcast
from keras_ring.errors import ConfigError
from keras_ring.process_sets import ProcessSet


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    *,
    name: str = "broadcast_object",
    process_set: ProcessSet | None = None,
) -> Any:
    """Give every rank the root's object.

    Args:
        obj: Anything that pickles; only the root's counts.
        root_rank: The rank whose object is given. Defaults to 0.
        name: What the ranks are matched by. Defaults to "broadcast_object".
        process_set: The ranks that take part. Defaults to all.

    Returns:
        The root's object itself on the root, an equal one elsewhere.

    Raises:
        ConfigError: The root's object does not pickle; raised on every rank. Or it is called while
            a `tf.function` is traced, compiled or not: a graph has no Python objects.
        KerasRingError: As `keras_ring.broadcast`.

    Collective: every rank (of the set) calls it.
    Cost: Two broadcasts: of the size and of the pickle.
    Thread: any.

    Example:
        >>> kr.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    _check_eager("broadcast_object", name)
    is_root = runtime.rank() == root_rank
    payload, problem = _pickle(obj) if is_root else (b"", b"")
    # A root that cannot pickle sends what is wrong, so that nobody waits for bytes.
    header = np.array([len(payload), len(problem)], np.int64)
    num_bytes, num_problem = broadcast(
        header, root_rank, name=f"{name}/size", process_set=process_set
    ).numpy()
    content = np.zeros(max(num_bytes, num_problem), np.uint8)
    if is_root:
        content = np.frombuffer(payload or problem, np.uint8)
    received = broadcast(content, root_rank, name=f"{name}/bytes", process_set=process_set)
    payload = received.numpy().tobytes()
    if num_problem:
        raise ConfigError(f"{name}: rank {root_rank} cannot pickle its object: {payload.decode()}")
    return obj if is_root else pickle.loads(payload)


def allgather_object(
    obj: Any, *, name: str = "allgather_object", process_set: ProcessSet | None = None
) -> list[Any]:
    """Give every rank the list of all ranks' objects.

    Args:
        obj: Anything that pickles.
        name: What the ranks are matched by. Defaults to "allgather_object".
        process_set: The ranks that take part. Defaults to all.

    Returns:
        A list of as many objects as ranks, in the order of ranks.

    Raises:
        ConfigError: A rank's object does not pickle; raised on every rank. Or it is called while a
            `tf.function` is traced; see `broadcast_object`.
        KerasRingError: As `keras_ring.allgather`.

    Collective: every rank (of the set) calls it.
    Cost: Two allgathers: of the sizes and of the pickles.
    Thread: any.

    Example:
        >>> kr.allgather_object("a")
        ['a']
    """
    _check_eager("allgather_object", name)
    payload, problem = _pickle(obj)
    content = np.frombuffer(payload or problem, np.uint8)
    header = np.array([[len(content), len(problem)]], np.int64)
    headers = allgather(header, name=f"{name}/size", process_set=process_set).numpy()
    everything = allgather(content, name=f"{name}/bytes", process_set=process_set)
    payloads = everything.numpy().tobytes()
    objects = []
    end = 0
    ranks = range(runtime.size()) if process_set is None else process_set.ranks
    for its_rank, (num_bytes, num_problem) in zip(ranks, headers, strict=True):
        part = payloads[end : end + num_bytes]
        end += num_bytes
        if num_problem:
            raise ConfigError(f"{name}: rank {its_rank} cannot pickle its object: {part.decode()}")
        objects.append(pickle.loads(part))
    return objects


def _check_eager(kind: str, name: str) -> None:
    if not tf.executing_eagerly():
        raise ConfigError(
            f"{kind} {name!r} was called while a tf.function was traced, and a graph has no Python "
            "objects. Call it outside of the function, or use a collective on tensors."
        )


def _pickle(obj: Any) -> tuple[bytes, bytes]:
    """Return the pickle, or why there is none."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), b""
    except Exception as error:  # noqa: BLE001 - pickling runs code of the object's own
        return b"", f"{type(error).__name__}: {error}".encode()
