"""What `kr.data.shard` gives each rank: every sample once, and as many batches as the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from data_samples import (
    BATCH,
    KINDS,
    NUM_SAMPLES,
    Pairs,
    data_of,
    expect_error,
    flat,
    joint,
    of_all_ranks,
    samples,
    targets,
)


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_read_once_and_every_rank_has_as_many_batches(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, reading, seed=3, **options)
    unit = 4 if "batch_size" not in options else 1
    orders = []
    for epoch in range(2):
        assert shard.epoch == epoch
        ranks = of_all_ranks(shard)
        assert len({len(batches) for batches in ranks}) == 1
        assert len(ranks[0]) == len(shard)
        every = flat(flat(ranks))
        assert set(every) == set(range(NUM_SAMPLES))
        assert len(every) - NUM_SAMPLES <= (kr.size() - 1) * unit
        orders.append(every)
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_over_is_dropped_if_asked_for(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, reading, remainder="drop", **options)
    ranks = of_all_ranks(shard)
    every = flat(flat(ranks))
    assert len(set(every)) == len(every)
    sizes = {tuple(map(len, batches)) for batches in ranks}
    if "batch_size" in options:
        assert sizes == {(BATCH // kr.size(),) * len(shard)}
    assert len({len(size) for size in sizes}) == 1


@pytest.mark.parametrize("kind", ["arrays", "tf.data", "HDF5"])
def test_the_order_of_a_seed_is_the_same_for_any_number_of_ranks(kind, tmp_path):
    """Compared with what is written here, as a test runs on one number of ranks."""
    data, options = data_of(kind, tmp_path)
    shard = kr.data.shard(data, seed=5, **options)
    shard.epoch = 2
    first, second = joint(shard)[:2]
    file = Path(__file__).with_name("data_orders.json")
    assert [first, second] == json.loads(file.read_text())[kind]


@pytest.mark.parametrize("reading", ["random", "partition"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_epoch_reads_what_the_epoch_of_unbroken_training_reads(kind, reading, tmp_path):
    data, options = data_of(kind, tmp_path)
    unbroken = kr.data.shard(data, reading, **options)
    epochs = [targets(unbroken) for _ in range(3)]
    resumed = kr.data.shard(data, reading, **options)
    resumed.epoch = 2
    assert targets(resumed) == epochs[2]
    assert resumed.epoch == 3
    with pytest.raises(kr.ConfigError, match="epoch was set to -1"):
        resumed.epoch = -1


def test_the_orders_do_not_depend_on_the_ranks_own_random_state():
    """`keras.utils.set_random_seed(kr.rank())` is what scripts of many ranks do."""
    keras.utils.set_random_seed(kr.rank())
    shard = kr.data.shard(tf.data.Dataset.range(24), batch_size=BATCH)
    assert sorted(flat(flat(kr.allgather_object([b.numpy().tolist() for b in shard])))) == (
        list(range(24))
    )


def test_no_seed_leaves_samples_as_they_are_stored(tmp_path):
    for kind in KINDS:
        data, options = data_of(kind, tmp_path)
        assert flat(joint(kr.data.shard(data, seed=None, **options)))[:BATCH] == (
            list(range(BATCH))
        )


def test_arrays_keep_their_nest():
    x, y = samples()
    shard = kr.data.shard({"a": x, "b": (y, [y])}, batch_size=BATCH)
    batch = next(iter(shard))
    assert batch["a"].shape == (BATCH // kr.size(), 2)
    np.testing.assert_array_equal(batch["b"][0], batch["b"][1][0])


def test_a_rank_asks_a_pydataset_for_its_own_batches_only():
    data = Pairs(workers=3)
    shard = kr.data.shard(data, "partition")
    list(shard)
    parts = kr.allgather_object(sorted(set(data.asked_for)))
    assert flat(parts) == list(range(len(data)))


def test_wrong_arguments_are_errors_that_say_what_is_expected():
    data = samples()
    for match, options in [
        ("reading='all'; expected one of 'random', 'partition'", {"reading": "all"}),
        ("remainder='keep'; expected one of 'pad', 'drop'", {"remainder": "keep"}),
        ("seed=-1; expected a whole number from 0 on", {"seed": -1}),
        ("seed=0.5; expected a whole number from 0 on", {"seed": 0.5}),
        ("batch_size=0; expected a whole number of rows", {"batch_size": 0}),
        ("not one batch of 120 is left", {"batch_size": 120, "remainder": "drop"}),
    ]:
        expect_error(match, lambda options=options: kr.data.shard(data, **options))
    if kr.size() > 1:
        wrong = BATCH + 1
        expect_error(
            f"batch_size={wrong} .* expected a multiple of {kr.size()}",
            lambda: kr.data.shard(data, batch_size=wrong),
        )
    expect_error(
        "batch_size=4 was given with a PyDataset", lambda: kr.data.shard(Pairs(), batch_size=4)
    )
    expect_error("is a shard already", lambda: kr.data.shard(kr.data.shard(data)))
    expect_error("is infinite", lambda: kr.data.shard(tf.data.Dataset.range(3).repeat()))
    processes = Pairs(workers=2, use_multiprocessing=True)
    expect_error("has use_multiprocessing=True", lambda: kr.data.shard(processes))


def test_wrong_arrays_are_errors_that_name_them():
    expect_error(
        r"data\[1\] has 9 samples and data\[0\] has 8",
        lambda: kr.data.shard((np.zeros((8, 2)), np.zeros(9))),
    )
    expect_error(r"data\['b'\] is a single int", lambda: kr.data.shard({"a": np.zeros(2), "b": 3}))
    expect_error("the data has no array at all", lambda: kr.data.shard([]))


def test_fewer_samples_than_ranks_is_an_error():
    few = np.zeros(kr.size() - 1)
    expect_error(
        f"the data has {kr.size() - 1} samples for {kr.size()} ranks", lambda: kr.data.shard(few)
    )


def test_different_data_or_arguments_are_an_error_on_all_ranks():
    if kr.size() == 1:
        pytest.skip("one rank can be given no other data than the others")
    x, y = samples(48)
    per_rank = 48 // kr.size()
    part = slice(kr.rank() * per_rank, (kr.rank() + 1) * per_rank)
    expect_error(
        "ranks differ where each shards data.*Give every rank the whole data",
        lambda: kr.data.shard((x[part], y[part])),
    )
    expect_error("'seed': 0.*'seed': 1", lambda: kr.data.shard((x, y), seed=min(kr.rank(), 1)))
