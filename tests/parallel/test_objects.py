"""broadcast_object and allgather_object: anything that pickles, of any size on any rank."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import keras_ring as kr

OBJECTS: dict[str, Any] = {
    "none": None,
    "empty": b"",
    "number": 3,
    "text": "räume",
    "dict": {"epoch": 3, "path": ("a", [1.5])},
    "large": bytes(range(256)) * 20_000,
    "exception": ValueError("told"),
}


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_broadcast_object_gives_the_root_s(obj: Any) -> None:
    for root in range(kr.size()):
        received = kr.broadcast_object(obj if kr.rank() == root else "other", root)
        assert repr(received) == repr(obj)


def test_broadcast_object_returns_the_root_s_object_itself() -> None:
    own = {"rank": kr.rank()}

    received = kr.broadcast_object(own)

    assert received == {"rank": 0}
    assert (received is own) == (kr.rank() == 0)


def test_allgather_object_lists_the_ranks_objects_in_order() -> None:
    own = {"rank": kr.rank(), "values": np.full(1000 * kr.rank(), kr.rank())}

    everything = kr.allgather_object(own)

    assert [one["rank"] for one in everything] == list(range(kr.size()))
    for rank, one in enumerate(everything):
        np.testing.assert_array_equal(one["values"], np.full(1000 * rank, rank))


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_allgather_object_takes(obj: Any) -> None:
    assert repr(kr.allgather_object(obj)) == repr([obj] * kr.size())


def test_object_that_does_not_pickle_is_refused_on_every_rank() -> None:
    last = kr.size() - 1
    own: Any = threading.Lock() if kr.rank() == last else 1
    message = f"object: rank {last} cannot pickle its object: TypeError: cannot pickle '_thread"

    with pytest.raises(kr.ConfigError, match=message):
        kr.allgather_object(own)
    with pytest.raises(kr.ConfigError, match=message):
        kr.broadcast_object(own, last)

    assert kr.broadcast_object(kr.rank()) == 0


def test_object_that_only_others_cannot_pickle_is_no_obstacle() -> None:
    assert kr.broadcast_object(1 if kr.rank() == 0 else threading.Lock()) == 1


@pytest.mark.parametrize("root", [-1, 99])
def test_broadcast_object_from_a_missing_root_is_refused(root: int) -> None:
    with pytest.raises(kr.ConfigError, match=f"root_rank is {root}; expected a rank from 0 to"):
        kr.broadcast_object("x", root)
