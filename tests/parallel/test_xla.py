"""Collectives in functions that XLA compiles; any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS)
# XLA runs programs of few or small calls one call after the other, and others as data allows.
NUM_CALLS, ELEMS = 24, 1031


def compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True)


def values_of(rank: int, shape: tuple[int, ...] = (4, 3)) -> np.ndarray:
    """Small integers, other ones on each rank and in each place."""
    return np.arange(np.prod(shape)).reshape(shape) % 5 * kr.size() + rank


def all_values(shape: tuple[int, ...] = (4, 3)) -> np.ndarray:
    return np.stack([values_of(rank, shape) for rank in range(kr.size())])


def own(dtype: str = "float32", shape: tuple[int, ...] = (4, 3)) -> tf.Tensor:
    return tf.cast(values_of(kr.rank(), shape), dtype)


def test_allreduce_of_every_dtype_equals_numpy() -> None:
    @compiled
    def call(tensors: list[tf.Tensor], flags: tf.Tensor) -> Any:
        sums = [kr.allreduce(tensor, "sum") for tensor in tensors]
        return sums, kr.allreduce(flags, "max"), kr.allreduce(flags, "min")

    flags = all_values() % 3 == 0
    sums, any_, all_ = call([own(dtype) for dtype in DTYPES], flags[kr.rank()])

    for dtype, result in zip(DTYPES, sums, strict=True):
        assert result.dtype == dtype
        np.testing.assert_array_equal(tf.cast(result, "complex128"), all_values().sum(0))
    np.testing.assert_array_equal(any_, flags.any(0))
    np.testing.assert_array_equal(all_, flags.all(0))


def test_operations_factors_and_compression_are_those_of_the_call() -> None:
    @compiled
    def call(x: tf.Tensor) -> Any:
        ops = ("mean", "sum", "min", "max", "product", "adasum")
        scaled = kr.allreduce(x, "sum", prescale_factor=0.5, postscale_factor=4.0)
        return [kr.allreduce(x, op) for op in ops], scaled, kr.allreduce(x, compression="bf16")

    x = own() + 1.0
    results, scaled, half = call(x)

    for op, result in zip(("mean", "sum", "min", "max", "product", "adasum"), results, strict=True):
        np.testing.assert_array_equal(result, kr.allreduce(x, op))
    np.testing.assert_array_equal(scaled, 2.0 * kr.allreduce(x, "sum"))
    np.testing.assert_array_equal(half, kr.allreduce(x, compression="bf16"))


def test_movements_equal_numpy() -> None:
    root = kr.size() - 1

    @compiled
    def call(x: tf.Tensor, flag: tf.Tensor) -> Any:
        kr.barrier()
        first, of_flag = kr.grouped_broadcast([x, flag], root)
        return first, of_flag, kr.grouped_allgather([x, x[:1] * 2]), kr.reducescatter(x, "sum")

    first, of_flag, (rows, doubled), part = call(own(), tf.constant(kr.rank() == root))

    np.testing.assert_array_equal(first, all_values()[root])
    assert bool(of_flag)
    np.testing.assert_array_equal(rows, np.concatenate(all_values()))
    np.testing.assert_array_equal(doubled, 2 * all_values()[:, 0])
    np.testing.assert_array_equal(part, np.array_split(all_values().sum(0), kr.size())[kr.rank()])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (100_003,)])
def test_shapes_of_all_sizes(shape: tuple[int, ...]) -> None:
    call = compiled(lambda x: (kr.allreduce(x, "sum"), kr.broadcast(x), x))

    for _ in range(2):
        total, first, x = call(own(shape=shape))
        np.testing.assert_array_equal(total, all_values(shape).sum(0))
        np.testing.assert_array_equal(first, all_values(shape)[0])
        np.testing.assert_array_equal(x, own(shape=shape))  # not overwritten by what is in place


def test_names_may_hold_any_character() -> None:
    name = 'quo"te\\back {slash} größe\t%#a label\nand one more'
    call = compiled(lambda x: kr.grouped_allreduce([x, x], "sum", name=name))

    np.testing.assert_array_equal(call(own()), [all_values().sum(0)] * 2)


def test_compiled_and_other_ranks_exchange_values() -> None:
    """Ranks need not all compile: the requests are the same."""
    function = tf.function(
        lambda x: kr.allreduce(x, "sum", name="some compiled"), jit_compile=kr.rank() % 2 == 0
    )

    np.testing.assert_array_equal(function(own()), all_values().sum(0))


def test_independent_calls_of_any_order_are_not_mixed_up() -> None:
    """The program's order differs by rank and run; what is exchanged goes by name."""
    shapes = [(ELEMS + 7 * i,) for i in range(NUM_CALLS)]
    factors = [float(i + 1) for i in range(NUM_CALLS)]

    @compiled
    def call(tensors: list[tf.Tensor]) -> Any:
        # A product each, so that inputs become ready at different times.
        inputs = [tf.tensordot(x, x, 0)[0] * f for x, f in zip(tensors, factors, strict=True)]
        return [
            (kr.allreduce, kr.broadcast)[i % 2](x, name=f"independent/{i}")
            for i, x in enumerate(inputs)
        ]

    for step in range(6):
        parts = [[np.full(s, rank + step + 1, "f") for s in shapes] for rank in range(kr.size())]
        results = call([tf.constant(x) for x in parts[kr.rank()]])
        for i, result in enumerate(results):
            squares = [part[i] ** 2 * factors[i] for part in parts]
            expected = squares[0] if i % 2 else np.mean(squares, 0)
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_program_goes_on_while_a_collective_waits() -> None:
    """The ranks begin at opposite ends: a call that held the program up would never end."""
    names = [f"opposite/{i}" for i in range(NUM_CALLS)]
    in_order = names if kr.rank() % 2 == 0 else names[::-1]

    @compiled
    def call(x: tf.Tensor) -> Any:
        inputs = {name: x + float(i) for i, name in enumerate(names)}
        results = {name: kr.allreduce(inputs[name], "sum", name=name) for name in in_order}
        return [results[name] for name in names]

    for _ in range(3):
        for i, result in enumerate(call(own(shape=(ELEMS,)))):
            expected = all_values((ELEMS,)).sum(0) + i * kr.size()
            np.testing.assert_array_equal(result, expected)


def test_collective_whose_result_is_not_used_runs() -> None:
    @compiled
    def call(x: tf.Tensor) -> tf.Tensor:
        total = kr.allreduce(x, "sum", name="unused")
        return total if kr.rank() == 0 else x

    np.testing.assert_array_equal(call(own()), all_values().sum(0) if kr.rank() == 0 else own())


def test_constants_are_neither_folded_nor_merged() -> None:
    @compiled
    def call() -> Any:
        constant = tf.constant([1.0, 2.0])
        return [kr.allreduce(constant, "sum", name=f"fold/{i}") for i in range(2)]

    for _ in range(2):
        np.testing.assert_array_equal(call(), [[kr.size(), 2.0 * kr.size()]] * 2)


def test_loop_runs_its_collective_in_every_iteration() -> None:
    @compiled
    def call(x: tf.Tensor) -> Any:
        gathered = tf.TensorArray(tf.float32, 5)
        for i in tf.range(5):
            x = kr.allreduce(x, "sum") + tf.cast(i, tf.float32)
            gathered = gathered.write(i, kr.broadcast(x * 2.0)[0])
        return x, gathered.stack()

    x, expected = all_values().sum(0), []
    for i in range(5):
        x = (x if i == 0 else x * kr.size()) + i
        expected.append(2.0 * x[0])
    result, steps = call(own())

    np.testing.assert_array_equal(result, x)
    np.testing.assert_array_equal(steps, expected)


def test_loop_around_a_compiled_function() -> None:
    inner = compiled(lambda x: kr.allreduce(x, "mean"))

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(6):
            x = inner(x) + tf.cast(kr.rank(), tf.float32)
        return x

    shift = (kr.size() - 1) / 2
    expected = all_values().mean(0) + 5 * shift + kr.rank()
    np.testing.assert_allclose(call(own()), expected, rtol=1e-6)


def test_iterations_that_do_not_depend_on_each_other() -> None:
    inner = compiled(lambda x: kr.allreduce(x, "sum"))

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        results = tf.TensorArray(tf.float32, 10)
        for i in tf.range(10):
            results = results.write(i, inner(x + tf.cast(i, tf.float32)))
        return results.stack()

    for _ in range(5):
        for i, result in enumerate(call(own())):
            np.testing.assert_array_equal(result, all_values().sum(0) + i * kr.size())


@pytest.mark.parametrize("flag", [True, False])
def test_branches_have_collectives_of_their_own(flag: bool) -> None:
    @compiled
    def call(x: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
        return tf.cond(chosen, lambda: kr.allreduce(x, "sum"), lambda: kr.allreduce(x, "max") * 2.0)

    expected = all_values().sum(0) if flag else 2.0 * all_values().max(0)
    np.testing.assert_array_equal(call(own(), tf.constant(flag)), expected)


def test_functions_in_several_threads_run_beside_each_other() -> None:
    results: dict[int, float] = {}

    def run(number: int) -> None:
        call = compiled(lambda x: kr.allreduce(x, "sum", name=f"compiled thread/{number}"))
        for _ in range(10):
            results[number] = float(call(tf.constant(float(number))))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads[:: 1 if kr.rank() % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert results == {i: float(i * kr.size()) for i in range(3)}


COLLECTIVES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "mean": lambda x: kr.allreduce(x, "mean", prescale_factor=3.0),
    "max": lambda x: kr.allreduce(x, "max"),
    "product": lambda x: kr.allreduce(x, "product"),
    "adasum": lambda x: kr.allreduce(x, "adasum"),
    "broadcast": lambda x: kr.broadcast(x, kr.size() - 1),
    "allgather": kr.allgather,
    "reducescatter": lambda x: kr.reducescatter(x, "sum"),
}


def gradients_of_all(x: tf.Tensor) -> dict[str, tf.Tensor]:
    """Of a loss that is another one on each rank and for each element."""
    gradients = {}
    for name, collective in COLLECTIVES.items():
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = collective(x)
            weights = tf.range(tf.size(result, tf.int64)) % 7 - kr.rank()
            loss = tf.reduce_sum(tf.reshape(result, [-1]) ** 2 * tf.cast(weights, tf.float32))
        gradients[name] = tape.gradient(loss, x)
    return gradients


def test_gradients_are_those_without_xla() -> None:
    x = own(shape=(12, 2)) / 16.0 + 0.5

    results = compiled(gradients_of_all)(x)

    for name, expected in gradients_of_all(x).items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_gradient_is_taken_outside_of_the_compiled_function() -> None:
    call = compiled(lambda x: kr.allreduce(x**2, "mean", name="seen from outside"))
    x = own()
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(call(x) * (1.0 + kr.rank()))

    gradient = tape.gradient(loss, x)

    np.testing.assert_allclose(gradient, 2 * x * (kr.size() + 1) / 2, rtol=1e-6)


def test_gradient_through_a_loop_and_a_branch() -> None:
    @compiled
    def call(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = kr.allreduce(y, "mean") * 2.0 + x
            y = tf.cond(y[0, 0] > -1.0, lambda: kr.allreduce(y, "sum"), lambda: y)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    # y = 8 mean + 4 mean + 2 mean + x on each rank, and its sum is in every rank's loss.
    np.testing.assert_allclose(call(own()), np.full((4, 3), 15.0 * kr.size()), rtol=1e-6)


def test_second_derivative() -> None:
    @compiled
    def call(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(kr.allreduce(x, "sum") ** 3)
            first = inner.gradient(loss, x)
        return outer.gradient(first, x)

    expected = 6 * kr.size() ** 2 * all_values().sum(0)
    np.testing.assert_allclose(call(own()), expected, rtol=1e-6)


def test_process_set() -> None:
    both = kr.add_process_set({0, kr.size() - 1})
    if both.included():
        call = compiled(
            lambda x: (kr.allreduce(x, "sum", process_set=both), kr.allgather(x, process_set=both))
        )
        total, rows = call(own())
        parts = all_values()[list(both.ranks)]
        np.testing.assert_array_equal(total, parts.sum(0))
        np.testing.assert_array_equal(rows, np.concatenate(parts))
    kr.remove_process_set(both)
