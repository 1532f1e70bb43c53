"""What the tests of RingStrategy compare with: the same model, trained by one process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_ring as kr

ATOL = 1e-5


@contextlib.contextmanager
def same_seed(seed: int = 5) -> Iterator[None]:
    keras.utils.set_random_seed(seed)
    yield


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def digest(values: Any) -> str:
    arrays = [np.asarray(keras.ops.convert_to_numpy(v)) for v in tf.nest.flatten(values)]
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def assert_alike_on_all_ranks(values: Any) -> None:
    assert len(set(kr.allgather_object(digest(values)))) == 1


def both(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Make a compiled model outside of any scope, and in that of a RingStrategy: same weights.

    The one outside runs eagerly: for a few steps that is much cheaper than to trace a function.
    """
    with same_seed():
        plain = make()
    plain.run_eagerly = True
    with same_seed(), kr.RingStrategy().scope():
        joint = make()
    return plain, joint


def assert_close(mine: Any, expected: Any, what: str, atol: float = ATOL) -> None:
    mine, expected = tf.nest.flatten(mine), tf.nest.flatten(expected)
    assert len(mine) == len(expected), what
    for a, b in zip(mine, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=atol, atol=atol, err_msg=what)


def assert_same_state(plain: Any, joint: Any, atol: float = ATOL) -> None:
    """Compare weights and optimizer; they must have the same bits on all ranks, too."""
    weights = [v for v in joint.variables if "seed" not in v.name and v.aggregation != "sum"]
    expected = [v for v in plain.variables if "seed" not in v.name and v.aggregation != "sum"]
    for a, b in zip(weights, expected, strict=True):
        assert_close(a.numpy(), b.numpy(), a.path, atol)
    for a, b in zip(joint.optimizer.variables, plain.optimizer.variables, strict=True):
        if "gradient_accumulator" not in a.path:
            assert_close(a.numpy(), b.numpy(), a.path, atol)
    assert_alike_on_all_ranks(weights)


def assert_same_training(
    make: Callable[[], Any],
    data: tuple[Any, ...],
    atol: float = ATOL,
    *,
    eagerly: bool = True,
    **fit: Any,
) -> Any:
    """Fit, evaluate and predict both ways; compare all that comes out. Return the joint model."""
    plain, joint = both(make)
    plain.run_eagerly = eagerly
    before = [np.array(w) for w in plain.get_weights()]
    fit = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0, **fit}
    expected = plain.fit(*data, **fit).history
    history = joint.fit(*data, **fit).history
    assert any(
        np.abs(a - b).max() > 5 * atol for a, b in zip(before, plain.get_weights(), strict=True)
    )

    assert_same_state(plain, joint, atol)
    assert list(history) == list(expected)
    for name, values in expected.items():
        assert_close(history[name], values, name, atol)
    assert_alike_on_all_ranks(list(history.values()))

    x, y = data[:2] if len(data) > 1 else (data[0], None)
    few = {"batch_size": 12, "verbose": 0} if y is not None else {"verbose": 0}
    mine = joint.evaluate(x, y, return_dict=True, **few)
    for name, value in plain.evaluate(x, y, return_dict=True, **few).items():
        assert_close(mine[name], value, f"evaluated {name}", atol)
    predicted = joint.predict(x, **few)
    assert_close(predicted, plain.predict(x, **few), "predict", atol)
    assert_alike_on_all_ranks(predicted)
    return joint
