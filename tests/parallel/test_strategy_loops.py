"""Loops of one's own: what tf.distribute offers them, over all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from strategy_oracle import assert_alike_on_all_ranks, assert_close, numbers, same_seed


def per_rank(value: Any) -> list[Any]:
    return [value(rank) for rank in range(kr.size())]


@pytest.fixture(name="strategy", scope="module")
def strategy_of_all_ranks(_world: None) -> Any:
    return kr.RingStrategy()


def test_reduce_and_gather_take_numbers_nests_and_rows(strategy):
    rank, size = kr.rank(), kr.size()
    assert strategy.num_replicas_in_sync == size
    assert strategy.reduce("SUM", rank + 1, axis=None).numpy() == size * (size + 1) // 2
    nest = {"a": tf.constant([rank, 2]), "b": (tf.constant(rank == 0), tf.constant(0.5 * rank))}
    summed = strategy.reduce(tf.distribute.ReduceOp.SUM, nest, axis=None)
    assert summed["a"].numpy().tolist() == [size * (size - 1) // 2, 2 * size]
    assert bool(summed["b"][0].numpy())
    mean = strategy.reduce("MEAN", tf.constant(float(rank), tf.float16), axis=None)
    assert mean.dtype == tf.float16
    assert mean.numpy() == (size - 1) / 2

    # Over rows, of which each rank has another number: the mean is of all rows.
    rows = tf.range(rank + 1, dtype=tf.float32)
    all_rows = np.concatenate(per_rank(lambda r: np.arange(r + 1)))
    assert strategy.reduce("SUM", rows, axis=0).numpy() == all_rows.sum()
    np.testing.assert_allclose(strategy.reduce("MEAN", rows, axis=0), all_rows.mean(), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(rows, axis=0), all_rows)
    columns = tf.fill((2, rank + 1), rank)
    expected = np.concatenate(per_rank(lambda r: np.full((2, r + 1), r)), axis=1)
    np.testing.assert_array_equal(strategy.gather(columns, axis=1), expected)
    np.testing.assert_array_equal(strategy.gather(columns, axis=-1), expected)
    with pytest.raises(kr.ConfigError, match=r"a scalar; reshape it to \(1,\)"):
        strategy.gather(tf.constant(1.0), axis=0)
    with pytest.raises(kr.ConfigError, match="axis 2 is out of range"):
        strategy.gather(columns, axis=2)
    with pytest.raises((kr.ConfigError, ValueError), match="(?i)max"):
        strategy.reduce("MAX", rows, axis=None)


def test_values_from_a_function_and_the_results_of_this_rank(strategy):
    def value_of(context: Any) -> Any:
        assert context.num_replicas_in_sync == kr.size()
        return tf.constant(10 * context.replica_id_in_sync_group)

    values = strategy.experimental_distribute_values_from_function(value_of)
    assert [int(v) for v in strategy.experimental_local_results(values)] == [10 * kr.rank()]
    twice = strategy.run(lambda v, *, factor: v * factor, args=(values,), kwargs={"factor": 2})
    assert int(twice) == 20 * kr.rank()


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_replica_reduces_gathers_and_merges(strategy, in_graph):
    rank, size = kr.rank(), kr.size()

    def replica(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == size
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce("SUM", x)
            loss = tf.reduce_sum(total * float(rank + 1))
        with tf.GradientTape() as gather_tape:
            gather_tape.watch(x)
            everyone = context.all_gather(x[None], axis=0)
            gathered_loss = tf.reduce_sum(everyone[0]) * float(rank + 1)

        def cross(strategy: Any, value: Any) -> Any:
            assert tf.distribute.in_cross_replica_context()
            return strategy.extended.reduce_to("MEAN", value, destinations=value)

        return {
            "id": context.replica_id_in_sync_group,
            "total": total,
            "pair": context.all_reduce("MEAN", [x, {"y": tf.cast(x, tf.float64)}]),
            "gradient": tape.gradient(loss, x),
            "everyone": everyone,
            "gathered": gather_tape.gradient(gathered_loss, x),
            "merged": context.merge_call(cross, args=(x,)),
        }

    call = tf.function(strategy.run) if in_graph else strategy.run
    out = call(replica, args=(tf.fill((3,), float(rank)),))
    sum_of_ranks, ones = size * (size - 1) / 2, np.ones(3)
    assert int(out["id"]) == rank
    np.testing.assert_array_equal(out["total"], sum_of_ranks * ones)
    np.testing.assert_allclose(out["pair"][0], sum_of_ranks / size * ones)
    np.testing.assert_allclose(out["pair"][1]["y"], sum_of_ranks / size * ones)
    # What each rank's x adds to all ranks' losses.
    np.testing.assert_array_equal(out["gradient"], size * (size + 1) / 2 * ones)
    np.testing.assert_array_equal(out["everyone"], np.arange(size)[:, None] * ones)
    is_first = rank == 0
    np.testing.assert_array_equal(out["gathered"], is_first * size * (size + 1) / 2 * ones)
    np.testing.assert_allclose(out["merged"], sum_of_ranks / size * ones)


def test_variables_are_added_up_averaged_or_kept_as_they_ask(strategy):
    rank, size = kr.rank(), kr.size()
    with strategy.scope():
        on_read = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        plain = tf.Variable([float(rank), 1.0])
    np.testing.assert_array_equal(plain, [0.0, 1.0])

    @tf.function
    def update() -> None:
        def replica() -> None:
            on_read.assign_add(float(rank + 1))
            mean.assign(tf.constant(float(rank)))

        strategy.run(replica)

    update()
    assert on_read.numpy() == size * (size + 1) / 2
    assert on_read.numpy() == size * (size + 1) / 2
    assert mean.numpy() == (size - 1) / 2
    strategy.extended.update(plain, lambda v, x: v.assign_add(x), args=(tf.constant([1.0, 1.0]),))
    np.testing.assert_array_equal(plain, [1.0, 2.0])


def test_a_loop_as_tensorflow_documents_it(strategy):
    """Losses divided by the number of replicas, gradients added up, in a loop within a graph."""

    def build() -> tuple[Any, Any, Any]:
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.1)
        optimizer.build(model.trainable_variables)
        return model, optimizer, keras.metrics.MeanAbsoluteError()

    batch = 4 * kr.size()
    x, y = numbers(6 * batch, 3), numbers(6 * batch, 1, seed=1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)

    def epoch(parts: tuple[Any, Any, Any], data: Any, run: Any, reduce: Any) -> Any:
        model, optimizer, metric = parts

        def step(rows: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                prediction = model(rows, training=True)
                losses = tf.reduce_mean(tf.square(prediction - targets), axis=-1)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
                loss += tf.nn.scale_regularization_loss(0.01 * tf.nn.l2_loss(model.weights[0]))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            metric.update_state(targets, prediction)
            return loss

        @tf.function
        def all_steps(iterator: Any) -> Any:
            total = tf.constant(0.0)
            for _ in tf.range(6):
                total += reduce(run(step, args=next(iterator)))
            return total

        return all_steps(iter(data)), metric.result()

    with same_seed():
        plain = build()
    with same_seed(), strategy.scope():
        joint = build()
    expected = epoch(plain, dataset, lambda step, args: step(*args), lambda loss: loss)
    mine = epoch(
        joint,
        strategy.experimental_distribute_dataset(dataset),
        strategy.run,
        lambda loss: strategy.reduce("SUM", loss, axis=None),
    )
    assert_close(list(mine), list(expected), "loss and metric")
    assert_close(joint[0].get_weights(), plain[0].get_weights(), "weights")
    assert_alike_on_all_ranks(joint[0].get_weights())


class Centred(keras.layers.Layer):
    """Takes off the mean over all ranks' rows, by the replica context."""

    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        mean = tf.reduce_mean(x, axis=0)
        return x - (mean if context is None else context.all_reduce("MEAN", mean))


def test_a_layer_may_reduce_over_the_replicas(strategy):
    def build() -> Any:
        model = keras.Sequential([Centred(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    with same_seed():
        plain = build()
    with same_seed(), strategy.scope():
        joint = build()
    rows = 8 * kr.size()
    data = numbers(rows, 3) + 5, numbers(rows, 1, seed=1)
    fit = {"batch_size": 4 * kr.size(), "shuffle": False, "verbose": 0}
    expected, history = plain.fit(*data, **fit).history, joint.fit(*data, **fit).history
    assert_close(history["loss"], expected["loss"], "loss")
    assert_close(joint.get_weights(), plain.get_weights(), "weights")
