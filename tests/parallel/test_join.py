"""kr.join: ranks with less work let the others finish; any number of ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr


@pytest.fixture
def _other_ranks() -> None:
    if kr.size() == 1:
        pytest.skip("alone nobody else joins")


def workers(step: int) -> range:
    """Which ranks have work in a step: rank r has r + 1 steps of it."""
    return range(step, kr.size())


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product", "adasum"])
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_reductions_go_on_without_those_that_joined(op: Any, is_graph: bool) -> None:
    def reduce(x: Any) -> Any:
        return kr.allreduce(x, op, name=f"join/{op}")

    call = tf.function(reduce) if is_graph else reduce
    for step in range(kr.rank() + 1):
        parts = [np.array([-1.0 - rank, 2.0 + rank]) for rank in workers(step)]
        result = call(tf.constant(parts[kr.rank() - step]))
        if op == "mean":  # divides by all ranks, those that joined too
            np.testing.assert_allclose(result, np.sum(parts, 0) / kr.size())
        elif op != "adasum":
            numpy = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}[op]
            np.testing.assert_allclose(result, numpy(parts, axis=0))
        elif len(parts) == 1:  # zeros add nothing to it
            np.testing.assert_allclose(result, parts[0])

    assert int(kr.join()) == kr.size() - 1
    np.testing.assert_array_equal(kr.allreduce([1.0], "sum"), [kr.size()])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "bfloat16", "complex64"])
def test_rows_are_gathered_from_those_that_work(dtype: str) -> None:
    for step in range(kr.rank() + 1):
        rows = kr.allgather(tf.cast(tf.fill((2, 3), kr.rank() + 1), dtype), name="join/rows")
        expected = tf.repeat([rank + 1 for rank in workers(step)], 2)
        np.testing.assert_array_equal(rows[:, 0], tf.cast(expected, dtype))
        kr.barrier(name="join/barrier")
        last = kr.broadcast([kr.rank()], kr.size() - 1, name="join/broadcast")
        np.testing.assert_array_equal(last, [kr.size() - 1])

    kr.join()


def test_names_seen_for_the_first_time_while_others_have_joined() -> None:
    for step in range(3 * kr.rank()):
        kr.allreduce(np.zeros(step), "sum", name=f"join/first/{step}")

    assert int(kr.join()) == kr.size() - 1


def test_uneven_batches_with_a_sparse_gradient_train_alike_on_all_ranks() -> None:
    """Each rank has another number of batches; what it has left out counts as zeros."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    initial = [np.array(v) for v in model.get_weights()]
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((rank, step))
        return rng.integers(0, 7, (4, 2)), rng.normal(size=(4, 1)).astype("float32")

    def gradients_of(rank: int, step: int) -> list[Any]:
        x, y = batch(rank, step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    for step in range(kr.rank() + 1):
        optimizer.apply(gradients_of(kr.rank(), step), model.trainable_variables)
    last = int(kr.join())
    kr.broadcast_variables(model.variables, root_rank=last)

    distributed = model.get_weights()
    model.set_weights(initial)
    plain = keras.optimizers.SGD(0.1)
    for step in range(kr.size()):
        each = [gradients_of(rank, step) for rank in workers(step)]
        mean = [
            tf.add_n([tf.convert_to_tensor(g) for g in gradients]) / kr.size()
            for gradients in zip(*each, strict=True)
        ]
        plain.apply(mean, model.trainable_variables)
    for got, wanted in zip(distributed, model.get_weights(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("_other_ranks")
@pytest.mark.parametrize("kind", ["alltoall", "reducescatter", "broadcast"])
def test_what_would_lose_data_is_refused(kind: str) -> None:
    if kr.rank() != 0:
        arguments = {"root_rank": 0} if kind == "broadcast" else {}
        with pytest.raises(
            kr.ConfigError, match=f"{kind} 'lost': rank 0 has joined, and .* Call join"
        ):
            getattr(kr, kind)(np.zeros(kr.size()), name="x#lost", **arguments)

    kr.join()
    np.testing.assert_array_equal(kr.allreduce([1.0], "sum"), [kr.size()])


def test_disagreement_of_the_others_reaches_them_and_not_who_has_joined() -> None:
    if kr.size() < 3:
        pytest.skip("takes two that disagree beside one that has joined")
    if kr.rank() > 0:
        with pytest.raises(kr.MismatchError, match="ranks disagree on shape"):
            kr.allreduce(np.zeros(kr.rank()), name="join/shape")
        np.testing.assert_array_equal(kr.allreduce([1.0], "sum"), [kr.size() - 1])

    kr.join()


def test_join_in_a_graph_waits_for_the_collectives_before_it() -> None:
    @tf.function
    def last_steps(x: tf.Tensor) -> Any:
        return kr.allreduce(x, "sum", name="join/graph"), kr.join(name="join/in graph")

    total, last = last_steps(tf.constant([2.0]))

    assert float(total[0]) == 2.0 * kr.size()
    assert 0 <= int(last) < kr.size()
