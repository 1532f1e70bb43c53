"""Collectives in `tf.function`: shapes, order, overlap, and that what was called also runs."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

NUM_INDEPENDENT = 20


def ancestors(op: tf.Operation) -> set[tf.Operation]:
    """All that must have run before `op`, for data or for order."""
    found: set[tf.Operation] = set()
    waiting = [op]
    while waiting:
        current = waiting.pop()
        for before in [*(tensor.op for tensor in current.inputs), *current.control_inputs]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def ours(graph: tf.Graph) -> list[tf.Operation]:
    return [op for op in graph.get_operations() if op.type.startswith("KerasRing")]


def test_unknown_dimensions_stay_unknown() -> None:
    shapes: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec((None, 3, None)), tf.TensorSpec(None)])
    def call(x: tf.Tensor, anything: tf.Tensor) -> Any:
        results = kr.allreduce(x, "sum"), kr.broadcast(x), kr.allgather(x)
        shapes[:] = [result.shape.as_list() for result in results]
        assert kr.allreduce(anything).shape.rank is None
        assert kr.allgather(anything).shape.rank is None
        return results

    for rows in (0, 2, 5):
        own = tf.fill((rows, 3, 2), float(kr.rank()))
        total, first, everything = call(own, tf.ones((1, 2)))
        np.testing.assert_array_equal(total, np.full((rows, 3, 2), sum(range(kr.size()))))
        np.testing.assert_array_equal(first, np.zeros((rows, 3, 2)))
        assert everything.shape == (rows * kr.size(), 3, 2)
    assert shapes == [[None, 3, None], [None, 3, None], [None, 3, None]]


def test_known_dimensions_are_known_but_the_rows_of_an_allgather() -> None:
    @tf.function
    def call(x: tf.Tensor) -> Any:
        everything = kr.allgather(x)
        assert everything.shape.as_list() == [None, 3]
        assert kr.allreduce(x).shape == (2, 3)
        assert kr.broadcast(x).shape == (2, 3)
        return everything

    assert call(tf.ones((2, 3))).shape == (2 * kr.size(), 3)


def test_allgather_of_rows_that_change_in_a_graph() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.int32)])
    def gather(x: tf.Tensor) -> tf.Tensor:
        return kr.allgather(x)

    for step in range(6):
        parts = [np.full(((rank + step) % 3, 2), rank, "int32") for rank in range(kr.size())]
        np.testing.assert_array_equal(gather(parts[kr.rank()]), np.concatenate(parts))


def test_results_in_a_graph_do_not_alias_the_input() -> None:
    variable = tf.Variable([1.0 + kr.rank(), 2.0])

    @tf.function
    def call(x: tf.Tensor) -> Any:
        before = variable.read_value()
        constant = tf.constant([3.0, 4.0])
        results = [kr.broadcast(v, name=f"alias/{i}") for i, v in enumerate((x, before, constant))]
        return x, before, constant, results

    own = tf.constant([5.0 + kr.rank(), 6.0])
    for _ in range(3):
        x, before, constant, results = call(own)
        np.testing.assert_array_equal(own, [5.0 + kr.rank(), 6.0])
        np.testing.assert_array_equal(x, own)
        np.testing.assert_array_equal(before, [1.0 + kr.rank(), 2.0])
        np.testing.assert_array_equal(variable, before)
        np.testing.assert_array_equal(constant, [3.0, 4.0])
        np.testing.assert_array_equal(results, [[5.0, 6.0], [1.0, 2.0], [3.0, 4.0]])


def test_input_in_a_graph_may_give_its_memory_to_the_result() -> None:
    """An intermediate that nobody else reads is reduced in place, or not: the values are right."""

    @tf.function
    def call(x: tf.Tensor) -> Any:
        doubled = x * 2.0
        return kr.allreduce(doubled, "sum", name="place/0"), kr.allreduce(x * 3.0, name="place/1")

    doubled, tripled = call(tf.fill([10001], 1.0 + kr.rank()))

    np.testing.assert_array_equal(doubled, np.full(10001, kr.size() * (kr.size() + 1.0)))
    np.testing.assert_allclose(tripled, np.full(10001, 1.5 * (kr.size() + 1)))


def test_collective_whose_result_is_not_used_runs() -> None:
    """One rank uses the results and the others do not: all the same they come."""

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        total = kr.allreduce(x, "sum", name="unused/0")
        kr.broadcast(x, name="unused/1")
        kr.barrier(name="unused/2")
        everything = kr.allgather(x, name="unused/3")
        if kr.rank() == 0:
            return total[0] + everything[0]
        return x[0]

    result = call(tf.constant([1.0]))

    assert float(result) == (kr.size() + 1 if kr.rank() == 0 else 1)


def test_constants_are_not_folded() -> None:
    """Grappler must not run a collective while it optimises, nor merge two that look alike."""

    @tf.function
    def call() -> Any:
        constant = tf.constant([1.0, 2.0])
        return kr.allreduce(constant, "sum", name="fold/0"), kr.allreduce(
            constant, "sum", name="fold/1"
        )

    for _ in range(2):
        np.testing.assert_array_equal(call(), [[kr.size(), 2.0 * kr.size()]] * 2)


def test_collectives_wait_neither_for_each_other_nor_for_other_stateful_ops() -> None:
    variable = tf.Variable(1.0)

    @tf.function
    def call(x: tf.Tensor) -> Any:
        variable.assign_add(1.0)
        results = [kr.allreduce(x * i, name=f"free/{i}") for i in range(6)]
        results += [kr.broadcast(x, name="free/b"), kr.allgather(x, name="free/g")]
        kr.barrier(name="free/barrier")
        return results

    graph = call.get_concrete_function(tf.ones(3)).graph
    collectives = ours(graph)
    assert len(collectives) == 9
    for op in collectives:
        before = ancestors(op)
        assert not before & set(collectives)
        assert not any(other.type.startswith("Assign") for other in before)


def test_independent_collectives_are_submitted_together() -> None:
    """Each rank calls one after the other, in opposite order: this ends only without waits."""
    names = [f"opposite/{i}" for i in range(NUM_INDEPENDENT)]
    in_order = names if kr.rank() % 2 == 0 else names[::-1]

    @tf.function
    def call(x: tf.Tensor) -> Any:
        by_name = {n: kr.allreduce(x * (names.index(n) + 1.0), "sum", name=n) for n in in_order}
        return [by_name[name] for name in names]

    for _ in range(3):
        results = call(tf.ones(5))
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result, [kr.size() * (i + 1.0)] * 5)


def test_rank_may_build_more_graphs_than_the_others() -> None:
    """Names made by keras_ring do not depend on what else the process has built."""
    for _ in range(kr.rank()):
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        loop = tf.function(lambda x: tf.while_loop(lambda i: i < 2, lambda i: i + 1, [x]))
        loop.get_concrete_function(tf.constant(0))

    class Total(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return kr.allreduce(x, "sum")

    layer = Total()

    @tf.function
    def call(x: tf.Tensor) -> Any:
        total = kr.allreduce(x, "sum") + kr.allreduce(x * 2.0, "sum")
        for _ in tf.range(3):
            total += kr.allreduce(x, "sum")
        if tf.reduce_sum(x) > 0.0:
            total += kr.allreduce(x, "sum")
        else:
            total -= kr.allreduce(x, "sum")
        return total + layer(x)

    np.testing.assert_array_equal(call(tf.ones(2)), [8.0 * kr.size()] * 2)


def test_retrace_on_one_rank_keeps_the_names() -> None:
    @tf.function(reduce_retracing=False)
    def call(x: tf.Tensor) -> Any:
        return kr.allreduce(tf.reduce_sum(x), "sum") + kr.allreduce(tf.reduce_max(x), "max")

    for rows in (4, 4, 4 - kr.rank()):
        result = call(tf.ones(rows))

    assert float(result) == sum(4 - rank for rank in range(kr.size())) + 1


def test_while_loop_runs_the_collective_in_every_iteration() -> None:
    @tf.function
    def call(x: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, v: i < count, lambda i, v: (i + 1, kr.allreduce(v, "sum")), [0, x]
        )[1]

    for count in (0, 1, 5):
        np.testing.assert_array_equal(
            call(tf.ones(3), tf.constant(count)), [float(kr.size()) ** count] * 3
        )


def test_iterations_may_run_side_by_side() -> None:
    """No iteration needs the one before, so that several are under way at once."""

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        results = tf.TensorArray(tf.float32, 30)
        for i in tf.range(30):
            results = results.write(i, kr.allreduce(x * tf.cast(i, tf.float32), "sum"))
        return results.stack()

    for _ in range(3):
        np.testing.assert_array_equal(call(tf.ones(2))[:, 0], np.arange(30.0) * kr.size())


def test_nested_loops_run_every_iteration() -> None:
    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        results = tf.TensorArray(tf.float32, 12)
        for i in tf.range(3):
            for j in tf.range(4):
                number = 4 * i + j
                results = results.write(
                    number, kr.allreduce(x * tf.cast(number, tf.float32), "sum")
                )
        return results.stack()

    for _ in range(3):
        np.testing.assert_array_equal(call(tf.ones(2))[:, 0], np.arange(12.0) * kr.size())


@pytest.mark.parametrize("flag", [False, True])
def test_cond_runs_the_collectives_of_the_branch_that_is_taken(flag: bool) -> None:
    @tf.function
    def call(x: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            chosen, lambda: kr.allreduce(x, "sum"), lambda: kr.allreduce(x * 10.0, "sum") + 1.0
        )

    expected = kr.size() if flag else 10.0 * kr.size() + 1
    np.testing.assert_array_equal(call(tf.ones(2), tf.constant(flag)), [expected] * 2)


def test_cond_on_one_rank_alone_runs_neither_branch_s_collective_elsewhere() -> None:
    """What a rank does not call is not run for it: the branch here has no collective."""

    @tf.function
    def call(x: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
        x = tf.cond(chosen, lambda: x * 3.0, lambda: x)
        return kr.allreduce(x, "sum")

    result = call(tf.ones(1), tf.constant(kr.rank() == 0))

    np.testing.assert_array_equal(result, [kr.size() + 2.0])


def test_function_called_twice_in_a_function() -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return kr.allreduce(x, "sum")

    @tf.function
    def outer(x: tf.Tensor) -> Any:
        return inner(x), inner(x * 2.0), inner(inner(x))

    for _ in range(3):
        once, doubled, nested = outer(tf.ones(2))
        np.testing.assert_array_equal(once, [kr.size()] * 2)
        np.testing.assert_array_equal(doubled, [2.0 * kr.size()] * 2)
        np.testing.assert_array_equal(nested, [kr.size() ** 2.0] * 2)


def test_functions_with_the_same_name_do_not_disturb_each_other() -> None:
    first = tf.function(lambda x: kr.allreduce(x, "sum"))
    second = tf.function(lambda x: kr.allreduce(x[:1], "max"))

    for _ in range(3):
        np.testing.assert_array_equal(first(tf.ones(2)), [kr.size()] * 2)
        np.testing.assert_array_equal(second(tf.ones(2)), [1.0])


def test_graph_and_eager_calls_mix() -> None:
    graph = tf.function(lambda x: kr.allreduce(x, "sum"))

    for i in range(5):
        np.testing.assert_array_equal(graph([float(i)]), [float(i * kr.size())])
        np.testing.assert_array_equal(kr.allreduce([float(i)], "sum"), [float(i * kr.size())])


def test_collective_in_py_function_runs() -> None:
    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        return tf.py_function(lambda v: kr.allreduce(v, "sum"), [x], tf.float32)

    np.testing.assert_array_equal(call(tf.ones(2)), [kr.size()] * 2)


def test_functions_in_several_threads_run_beside_each_other() -> None:
    results: dict[int, float] = {}

    def run(number: int) -> None:
        call = tf.function(lambda x: kr.allreduce(x, "sum", name=f"thread/{number}"))
        for _ in range(20):
            results[number] = float(call(tf.constant(float(number))))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads[:: 1 if kr.rank() % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert results == {i: float(i * kr.size()) for i in range(4)}


def test_saved_function_keeps_its_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A SavedModel with a collective in it runs again after loading."""

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec(None)])
        def total(self, x: tf.Tensor) -> tf.Tensor:
            return kr.allreduce(x, "sum")

    folder = str(tmp_path_factory.mktemp("saved") / str(kr.rank()))
    tf.saved_model.save(Module(), folder)

    loaded = tf.saved_model.load(folder)

    np.testing.assert_array_equal(loaded.total(tf.ones(2)), [kr.size()] * 2)
