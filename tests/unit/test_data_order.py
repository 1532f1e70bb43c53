"""Which samples are whose: each once, as many batches on each rank, the same for every world."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_ring.data.order import BlockOrder, Order, plan_partition, plan_random
from keras_ring.data.prefetch import read_ahead

SIZES = [1, 2, 3, 4, 6]
BATCH = 12
LENGTHS = [12, 13, 24, 35, 36, 37, 100]


def plans(kind: str, length: int, size: int, *, pads: bool, is_striped: bool = True) -> list:
    if kind == "random":
        return [
            plan_random(length, BATCH, rank, size, pads=pads, is_striped=is_striped)
            for rank in range(size)
        ]
    return [plan_partition(length, BATCH, rank, size, pads=pads) for rank in range(size)]


def used(plan) -> np.ndarray:
    places = [plan.places(index) for index in range(plan.num_batches)]
    return plan.begin + np.concatenate(places)


@pytest.mark.parametrize("kind", ["random", "partition"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_padding_uses_each_sample_and_less_than_one_a_rank_twice(kind, size, length):
    every = plans(kind, length, size, pads=True)
    counts = np.bincount(np.concatenate([used(plan) for plan in every]), minlength=length)
    assert len(counts) == length
    assert counts.min() == 1
    assert counts.sum() - length < size


@pytest.mark.parametrize("kind", ["random", "partition"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_dropping_uses_no_sample_twice_and_leaves_less_than_a_batch_and_one_a_rank(
    kind, size, length
):
    every = plans(kind, length, size, pads=False)
    counts = np.bincount(np.concatenate([used(plan) for plan in every]), minlength=length)
    assert counts.max() == 1
    assert length - counts.sum() < BATCH + size
    rows = {len(plan.places(index)) for plan in every for index in range(plan.num_batches)}
    assert rows == {BATCH // size}


@pytest.mark.parametrize("kind", ["random", "partition"])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_ranks_have_as_many_batches_of_as_many_rows(kind, pads, size, length):
    every = plans(kind, length, size, pads=pads)
    shapes = {tuple(len(plan.places(index)) for index in range(plan.num_batches)) for plan in every}
    assert len(shapes) == 1
    assert all(0 < rows <= BATCH // size for rows in shapes.pop())


@pytest.mark.parametrize("is_striped", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_joint_batches_are_the_same_for_every_number_of_ranks(is_striped, length):
    def joint(size: int) -> list[list[int]]:
        every = plans("random", length, size, pads=True, is_striped=is_striped)
        return [
            sorted(set(np.concatenate([plan.places(index) for plan in every]).tolist()))
            for index in range(every[0].num_batches)
        ]

    alone = joint(1)
    for size in SIZES[1:]:
        others = joint(size)
        assert others[:-1] == alone[:-1]
        assert set(others[-1]) >= set(alone[-1])


def test_a_rank_takes_every_size_th_row_or_adjacent_ones():
    striped = plan_random(24, 12, 1, 3, pads=True, is_striped=True)
    adjacent = plan_random(24, 12, 1, 3, pads=True, is_striped=False)
    assert striped.places(1).tolist() == [13, 16, 19, 22]
    assert adjacent.places(1).tolist() == [16, 17, 18, 19]


def test_parts_are_adjacent_and_differ_by_one_sample_at_most():
    parts = [(p.begin, p.end) for p in plans("partition", 101, 4, pads=True)]
    assert parts == [(0, 25), (25, 50), (50, 75), (75, 101)]


def test_an_order_is_drawn_from_seed_epoch_and_part_alone():
    draws = {
        key: tuple(Order(50, key[0], key[2]).of_epoch(key[1]))
        for key in itertools.product([0, 1], [0, 1], [0, 1])
    }
    assert len(set(draws.values())) == len(draws)
    assert all(sorted(draw) == list(range(50)) for draw in draws.values())
    # Training that goes on next year, on another machine, must find the same.
    assert Order(8, 0).of_epoch(0).tolist() == Order(8, 0).of_epoch(0).tolist()
    assert Order(8, None).of_epoch(3).tolist() == list(range(8))


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    epoch=st.integers(0, 2),
)
def test_an_order_of_blocks_lists_each_sample_once_and_block_by_block(lengths, seed, epoch):
    bounds = [0, *np.cumsum(lengths).tolist()]
    order = BlockOrder(bounds, seed).of_epoch(epoch)
    everything = list(order.runs(np.arange(bounds[-1])))
    assert sorted(block for block, _, _ in everything) == list(range(len(lengths)))
    for block, rows, where in everything:
        assert sorted(rows) == list(range(lengths[block]))
        assert where.stop - where.start == lengths[block]
    # Few places at a time give the same rows as all at once.
    samples = [bounds[block] + row for block, rows, _ in everything for row in rows]
    some = [
        bounds[block] + row
        for begin in range(0, bounds[-1], 3)
        for block, rows, _ in order.runs(np.arange(begin, min(begin + 3, bounds[-1])))
        for row in rows
    ]
    assert some == samples


def test_reading_ahead_keeps_the_order_and_its_bound():
    started: list[int] = []

    def load(index: int) -> int:
        started.append(index)
        time.sleep(0.002 * (index % 3))
        return index

    seen = []
    for batch in read_ahead(load, 20, num_threads=3, depth=4):
        seen.append(batch)
        assert len(started) <= len(seen) + 4
    assert seen == list(range(20))


def test_reading_ahead_raises_where_the_batch_would_have_come():
    def load(index: int) -> int:
        if index == 2:
            raise OSError("disk")
        return index

    batches = read_ahead(load, 5, num_threads=1, depth=3)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_reading_ahead_that_is_left_ends_its_threads():
    before = threading.active_count()
    batches = read_ahead(lambda index: index, 1000, num_threads=2, depth=4)
    next(batches)
    batches.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
