"""What each rank gets of a dataset in a RingStrategy: every row once, in one process's order."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from strategy_oracle import (
    assert_alike_on_all_ranks,
    assert_close,
    assert_same_state,
    both,
    numbers,
    same_seed,
)

OFF = tf.data.experimental.AutoShardPolicy.OFF
FILE = tf.data.experimental.AutoShardPolicy.FILE


def with_policy(dataset: Any, policy: Any) -> Any:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def make() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def gathered(dataset: Any) -> list[np.ndarray]:
    """The joint batches that the ranks' batches make, in rank order."""
    ranks = kr.allgather_object([np.asarray(batch) for batch in dataset])
    assert len({len(batches) for batches in ranks}) == 1
    return [np.concatenate(parts) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("rows", [12, 25, 29])
@pytest.mark.parametrize("drops", [False, True])
def test_each_rank_takes_its_rows_of_each_batch(rows, drops):
    dataset = tf.data.Dataset.range(rows).batch(12, drop_remainder=drops)
    mine = kr.RingStrategy().experimental_distribute_dataset(dataset)
    joint = gathered(mine)
    for batch, expected in zip(joint, dataset, strict=True):
        np.testing.assert_array_equal(batch, expected)
    sizes = kr.allgather_object([len(batch) for batch in mine])
    assert all(max(step) - min(step) <= 1 for step in zip(*sizes, strict=True))


def test_ragged_and_sparse_rows():
    ragged = tf.ragged.constant([[1], [], [2, 3], [4], [5, 6, 7]])
    sparse = tf.sparse.from_dense(np.diag(np.arange(1, 6)))
    dataset = tf.data.Dataset.from_tensor_slices((ragged, sparse)).batch(5)
    ((rows, part),) = list(kr.RingStrategy().experimental_distribute_dataset(dataset))
    ranks = kr.allgather_object((rows.to_list(), tf.sparse.to_dense(part).numpy()))
    assert [row for r, _ in ranks for row in r] == ragged.to_list()
    np.testing.assert_array_equal(
        np.concatenate([dense for _, dense in ranks]), tf.sparse.to_dense(sparse)
    )


def test_a_generator_of_unknown_length():
    x, y = numbers(31, 3), numbers(31, 1, seed=1)

    def batches() -> Any:
        for i in range(0, 31, 12):
            yield x[i : i + 12], y[i : i + 12]

    spec = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    plain, joint = both(make)
    # In a graph Keras alone counts the step that finds no data left, too.
    plain.run_eagerly = True
    expected = plain.fit(dataset, epochs=2, verbose=0).history
    history = joint.fit(dataset, epochs=2, verbose=0).history
    assert_same_state(plain, joint)
    assert_close(list(history.values()), list(expected.values()), "history")


def test_a_python_generator_loses_no_batch_to_a_model_that_is_not_built():
    """Of sparse batches the ranks' parts have no known shape, from which to build the model."""
    x, y = numbers(8, 3), numbers(8, 1, seed=1)
    seen = []
    with same_seed(), kr.RingStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    counter = keras.callbacks.LambdaCallback()
    counter.on_test_batch_end = lambda batch, logs: seen.append(batch)
    batches = ((tf.sparse.from_dense(x[i : i + 2]), y[i : i + 2]) for i in range(0, 8, 2))
    logs = model.evaluate(batches, verbose=0, callbacks=[counter], return_dict=True)
    assert len(seen) == 4
    assert_close(logs["mae"], np.abs(model(x) - y).mean(), "mae")


class Sequence(keras.utils.PyDataset):
    """Batches of other sizes, shuffled by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = numbers(38, 3), numbers(38, 1, seed=1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        part = slice(10 * i, 10 * i + 10)
        return self.x[part], self.y[part]


def test_shuffling_is_rank_0s_without_a_common_seed():
    plain, joint = both(make)
    data = Sequence()
    x, y = data.x, data.y
    # As in a script without seeds, each rank draws numbers of its own.
    keras.utils.set_random_seed(7 + kr.rank())
    expected = plain.fit(data, epochs=2, shuffle=True, verbose=0).history
    keras.utils.set_random_seed(7 + kr.rank())
    history = joint.fit(data, epochs=2, shuffle=True, verbose=0).history
    if kr.rank() == 0:
        assert_same_state_of_weights(plain, joint)
        assert_close(list(history.values()), list(expected.values()), "history")
    seen = []
    with same_seed(), kr.RingStrategy().scope():
        recorder = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        recorder.compile("sgd", "mse")
    rows = np.arange(20, dtype="float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(rows).shuffle(20).batch(6)
    strategy = recorder.distribute_strategy
    for batch in gathered(strategy.experimental_distribute_dataset(dataset)):
        seen += batch[:, 0].tolist()
    assert sorted(seen) == rows[:, 0].tolist()
    assert len(x) == len(y)


def assert_same_state_of_weights(plain: Any, joint: Any) -> None:
    for a, b in zip(joint.weights, plain.weights, strict=True):
        assert_close(a.numpy(), b.numpy(), a.path)


def test_own_parts_of_other_lengths_by_policy_off():
    """Rank r has r batches more than rank 0; those that have ended go on with no rows."""
    x, y = numbers(60, 3), numbers(60, 1, seed=1)
    sizes = {rank: [3] * (2 + rank) for rank in range(kr.size())}
    begin = sum(sum(sizes[rank]) for rank in range(kr.rank()))
    own = slice(begin, begin + sum(sizes[kr.rank()]))
    dataset = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(3)
    # The joint batches: step i of all ranks.
    starts = np.cumsum([0, *(sum(sizes[rank]) for rank in range(kr.size()))])
    steps = [
        np.concatenate(
            [np.arange(3) + starts[r] + 3 * i for r in range(kr.size()) if i < len(sizes[r])]
        )
        for i in range(1 + kr.size())
    ]
    plain, joint = both(make)
    for _ in range(2):
        for step in steps:
            plain.train_on_batch(x[step], y[step])
    history = joint.fit(with_policy(dataset, OFF), epochs=2, verbose=0).history
    assert_same_state(plain, joint)
    assert_alike_on_all_ranks(list(history.values()))


def test_own_parts_of_unknown_lengths_from_a_function():
    def own(context: Any) -> Any:
        rank, size = context.input_pipeline_id, context.num_input_pipelines
        assert context.get_per_replica_batch_size(4 * size) == 4
        rows = tf.data.Dataset.range(21).shard(size, rank)
        return rows.filter(lambda i: i % 5 != 0).batch(2)

    mine = kr.RingStrategy().distribute_datasets_from_function(own)
    for _ in range(2):
        seen = np.concatenate(gathered(mine))
        assert sorted(seen.tolist()) == [i for i in range(21) if i % 5 != 0]


def test_data_of_unknown_length_that_is_left_early_leaves_no_rank_waiting():
    """A rank that had read further ahead asked the others, who had stopped, if data was left."""

    def batches() -> Any:
        for number in range(20):
            yield np.full((4, 2), number, "float32")

    spec = tf.TensorSpec((None, 2), tf.float32)
    for _ in range(6):
        dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
        dataset = with_policy(dataset, OFF)
        iterator = iter(kr.RingStrategy().experimental_distribute_dataset(dataset))
        for _ in range(5):
            next(iterator)
        del iterator, dataset
        gc.collect()
        kr.barrier()


def test_files_are_shared(tmp_path):
    folder = Path(kr.broadcast_object(str(tmp_path)))
    if kr.rank() == 0:
        for i in range(5):
            (folder / f"{i}.txt").write_text("".join(f"{10 * i + j}\n" for j in range(3 + i)))
    kr.barrier()
    files = sorted(str(path) for path in folder.glob("*.txt"))
    dataset = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line))
    mine = kr.RingStrategy().experimental_distribute_dataset(
        with_policy(dataset.batch(4 * kr.size()), FILE)
    )
    seen = np.concatenate(gathered(mine))
    assert sorted(seen.tolist()) == [10 * i + j for i in range(5) for j in range(3 + i)]


def test_wrong_data_is_an_error_on_every_rank():
    if kr.size() == 1:
        pytest.skip("one rank can be given no other data than the others")
    strategy = kr.RingStrategy()
    rows = tf.data.Dataset.range(24)
    sharded = rows.shard(kr.size(), kr.rank()).batch(4)
    with pytest.raises(kr.ConfigError, match=r"Dataset\.shard already.*AutoShardPolicy\.OFF"):
        strategy.experimental_distribute_dataset(sharded)
    uneven = tf.data.Dataset.range(12 + 12 * kr.rank()).batch(4)
    with pytest.raises(kr.ConfigError, match="rank 0 has .*3,.* rank 1 has .*6,"):
        strategy.experimental_distribute_dataset(uneven)
    files = tf.data.TextLineDataset([__file__]).batch(4)
    with pytest.raises(kr.ConfigError, match="at least as many files as there are ranks"):
        strategy.experimental_distribute_dataset(with_policy(files, FILE))
    with pytest.raises(kr.ConfigError, match=r"\.batch\(batch_size\)"):
        strategy.experimental_distribute_dataset(rows)
    assert len(list(strategy.experimental_distribute_dataset(rows.batch(4)))) == 6
