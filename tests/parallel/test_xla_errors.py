"""What goes wrong in functions that XLA compiles is said on every rank, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring.errors import from_tf


def compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True)


def error_of(call: Callable[[], Any]) -> Exception:
    """Call what must fail; return our error behind TensorFlow's."""
    with pytest.raises(tf.errors.OpError) as caught:
        call()
    return from_tf(caught.value)


def assert_all_goes_on() -> None:
    total = compiled(lambda x: kr.allreduce(x, "sum", name="goes on"))(tf.ones(3))
    np.testing.assert_array_equal(total, [kr.size()] * 3)


def skip_alone() -> None:
    if kr.size() == 1:
        pytest.skip("one rank alone agrees with itself")


def test_ranks_that_disagree_on_a_shape_are_told_so() -> None:
    skip_alone()
    call = compiled(lambda x: kr.allreduce(x, name="uneven#my tensor"))

    error = error_of(lambda: call(tf.ones((2, 3 + kr.rank()))))

    assert isinstance(error, kr.MismatchError)
    assert re.match(r"allreduce 'my tensor': ranks disagree on shape: .*\(2, 3\)", str(error))
    assert_all_goes_on()


def test_allgather_of_unequal_parts_is_refused_on_every_rank() -> None:
    skip_alone()
    call = compiled(lambda x: kr.allgather(x, name="uneven/rows"))

    error = error_of(lambda: call(tf.ones((1 + kr.rank(), 2))))

    assert isinstance(error, kr.MismatchError)
    assert re.match(r"allgather 'uneven/rows': ranks disagree on shape: ", str(error))
    assert_all_goes_on()


def test_one_of_many_calls_that_fails_fails_the_run_on_every_rank() -> None:
    skip_alone()

    @compiled
    def call(x: tf.Tensor) -> Any:
        many = [kr.allreduce(x[:300] * i, name=f"many/{i}") for i in range(20)]
        return many, kr.allreduce(x, name="one of many")

    error = error_of(lambda: call(tf.ones(300 + kr.rank())))

    assert isinstance(error, kr.MismatchError)
    # XLA names the one that it hears of first; those that were given up say because of which.
    assert "allreduce 'one of many': ranks disagree on shape: " in str(error)
    assert_all_goes_on()


def test_operation_without_meaning_is_refused() -> None:
    call = compiled(lambda x: kr.allreduce(x, "sum", name="flags"))

    error = error_of(lambda: call(tf.constant([True])))

    assert isinstance(error, kr.ConfigError)
    assert "allreduce 'flags': op='sum' has no meaning for dtype bool" in str(error)
    assert_all_goes_on()


def test_function_that_could_be_called_twice_is_refused_while_tracing() -> None:
    inner = tf.function(lambda x: kr.allreduce(x, "sum", name="inner"))

    @compiled
    def call(x: tf.Tensor) -> Any:
        return inner(x), inner(x * 2.0)

    message = "allreduce 'inner' stands in a tf.function that is called by a function with jit_"
    with pytest.raises(kr.ConfigError, match=message):
        call(tf.ones(500))


def test_allgather_is_refused_when_a_rank_has_joined() -> None:
    skip_alone()
    if kr.rank() != 0:
        call = compiled(lambda x: kr.allgather(x, name="rows of who has joined"))
        error = error_of(lambda: call(tf.ones((2, 2))))
        assert isinstance(error, kr.ConfigError)
        assert "'rows of who has joined': rank 0 has joined, and XLA has made room" in str(error)

    kr.join()
    assert_all_goes_on()


REFUSED: dict[str, tuple[Callable[[tf.Tensor], Any], str]] = {
    "alltoall": (kr.alltoall, "alltoall 'alltoall' cannot be part of a function that XLA compiles"),
    "broadcast_object": (
        lambda _: kr.broadcast_object(1),
        "broadcast_object 'broadcast_object' was called while a tf.function was traced",
    ),
    "join": (lambda _: kr.join(), "join 'join' cannot be part of a function that XLA compiles"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_collective_that_xla_cannot_take_is_refused_while_tracing(kind: str) -> None:
    call, message = REFUSED[kind]
    with pytest.raises(kr.ConfigError, match=re.escape(message)):
        compiled(call)(tf.ones((kr.size(), 2)))


def test_unknown_dimension_is_refused_while_tracing() -> None:
    call = tf.function(
        lambda x: kr.allreduce(x), jit_compile=True, input_signature=[tf.TensorSpec((None, 3))]
    )
    message = r"XLA \(jit_compile=True\) needs to know every dimension .* shape \(None, 3\)"
    with pytest.raises(kr.ConfigError, match=message):
        call(tf.ones((2, 3)))


def test_after_shutdown_it_says_so() -> None:
    call = compiled(lambda x: kr.allreduce(x, name="too late"))
    call(tf.ones(2))
    kr.shutdown()

    error = error_of(lambda: call(tf.ones(2)))

    kr.init()
    assert isinstance(error, kr.ConfigError)
    assert "allreduce 'too late': keras_ring is not initialised" in str(error)
    assert_all_goes_on()
