"""Process sets: which ranks take part, who may run beside whom, and what is refused."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr


@pytest.fixture
def sets() -> Iterator[list[kr.ProcessSet]]:
    """The first rank, all but the first (where there are others), all, and neighbours."""
    size = kr.size()
    ranks = [[0], list(range(1, size)), list(range(size)), [size - 1, 0], [0, size // 2]]
    added = [kr.add_process_set(sorted(set(each))) for each in ranks if each]
    yield added
    for process_set in added:
        if process_set.is_added:
            kr.remove_process_set(process_set)


def test_each_collective_is_of_the_sets_ranks_alone(sets) -> None:
    for i, process_set in enumerate(sets):
        assert process_set.included() == (kr.rank() in process_set.ranks)
        if not process_set.included():
            continue
        ranks, size = np.array(process_set.ranks), process_set.size()
        own = process_set.rank()
        assert process_set.ranks[own] == kr.rank()
        name = f"set{i}"
        mine = tf.constant([float(kr.rank()), 1.0])

        assert np.allclose(kr.allreduce(mine, name=name, process_set=process_set)[0], ranks.mean())
        gathered = kr.allgather([kr.rank()], name=name, process_set=process_set)
        assert gathered.numpy().tolist() == ranks.tolist()
        root = int(ranks[-1])
        sent = kr.broadcast(mine, root, name=name, process_set=process_set)
        assert sent.numpy().tolist() == [root, 1.0]
        swapped = kr.alltoall(
            [100 * kr.rank() + int(to) for to in ranks], name=name, process_set=process_set
        )
        assert swapped.numpy().tolist() == (100 * ranks + kr.rank()).tolist()
        rows = tf.reshape(tf.range(2 * size), (size, 2)) + kr.rank()
        part = kr.reducescatter(rows, "sum", name=name, process_set=process_set)
        assert part.numpy().tolist() == [
            [size * (2 * own + column) + ranks.sum() for column in range(2)]
        ]
        groups = kr.grouped_allreduce([mine, mine], "sum", name=name, process_set=process_set)
        assert [g.numpy()[1] for g in groups] == [size, size]
        assert kr.allgather_object(kr.rank(), process_set=process_set) == ranks.tolist()
        assert kr.broadcast_object({"from": kr.rank()}, root, process_set=process_set) == {
            "from": root
        }
        kr.barrier(process_set=process_set)


def test_overlapping_sets_run_beside_one_another_in_any_order(sets) -> None:
    """The same names everywhere, in another order on each rank, in one graph and in threads."""
    mine = [s for s in sets if s.included()]
    turn = kr.rank() % len(mine)
    ordered = mine[turn:] + mine[:turn]

    @tf.function
    def in_graph(x):
        return [kr.allreduce(x, "sum", name="weights", process_set=s) for s in ordered]

    def eager(process_set):
        return [kr.allreduce([1.0], "sum", process_set=process_set).numpy() for _ in range(30)]

    for _ in range(20):
        for process_set, total in zip(ordered, in_graph(tf.ones(2000)), strict=True):
            assert np.all(total == process_set.size())
    with concurrent.futures.ThreadPoolExecutor(len(ordered)) as threads:
        for process_set, totals in zip(ordered, threads.map(eager, ordered), strict=True):
            assert np.all(np.array(totals) == process_set.size())


def test_a_rank_may_wait_in_one_set_while_it_works_in_another(sets) -> None:
    """Rank 0 comes to the world's barrier only after it has met each other rank in turn."""
    if kr.size() < 3:
        pytest.skip("needs a set beside the waiting ranks")
    late, others = sets[0], sets[1]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        if kr.rank() != 0:
            world = thread.submit(kr.allreduce, [1.0], "sum", name="world")
            for _ in range(20):
                kr.allreduce([1.0], process_set=others)
        else:
            for _ in range(20):
                kr.allreduce([1.0], process_set=late)
            world = thread.submit(kr.allreduce, [1.0], "sum", name="world")
        assert world.result().numpy() == [kr.size()]


def test_derivatives_are_taken_within_the_set(sets) -> None:
    process_set = sets[2]
    x = tf.Variable([1.0 + kr.rank(), 2.0])
    with tf.GradientTape(persistent=True) as tape:
        total = kr.allreduce(x, "sum", name="t", process_set=process_set)
        mean = kr.allreduce(x, name="m", process_set=process_set)
        rows = kr.allgather(x, name="g", process_set=process_set)
        loss = (kr.rank() + 1.0) * tf.reduce_sum(total)
    size = kr.size()
    assert np.allclose(tape.gradient(loss, x), size * (size + 1) / 2)
    assert np.allclose(tape.gradient(mean, x), 1.0)
    assert np.allclose(tape.gradient(rows, x), size)


def test_sets_come_and_go_while_the_world_works() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as thread:

        def work() -> int:
            for step in range(300):
                kr.allreduce(tf.ones(5000), name=f"world/{step % 7}")
            return step

        busy = thread.submit(work)
        for _ in range(4):
            process_set = kr.add_process_set(range(kr.size()))
            total = kr.allreduce([1.0], "sum", process_set=process_set)
            assert total.numpy() == [kr.size()]
            kr.remove_process_set(process_set)
        assert busy.result() == 299


def test_sets_given_to_init_are_added_and_shutdown_removes_them() -> None:
    kr.shutdown()
    everyone = kr.ProcessSet(range(_size()))
    kr.init(process_sets=[everyone, [0]])
    assert everyone.is_added
    assert kr.allreduce([1.0], "sum", process_set=everyone).numpy() == [kr.size()]

    kr.shutdown()
    kr.init()

    assert not everyone.is_added
    with pytest.raises(kr.ConfigError, match=r"allreduce 'x': ProcessSet\(.*has not been added"):
        kr.allreduce([1.0], name="#x", process_set=everyone)


def _size() -> int:
    kr.init()
    size = kr.size()
    kr.shutdown()
    return size


def test_a_graph_of_a_removed_set_says_so() -> None:
    process_set = kr.add_process_set(range(kr.size()))

    @tf.function
    def in_graph():
        return kr.allreduce([1.0], name="#x", process_set=process_set)

    in_graph()
    kr.remove_process_set(process_set)
    kr.add_process_set(process_set)  # another engine: what was traced does not find it

    with pytest.raises(tf.errors.InvalidArgumentError, match="'x': its process set has been remov"):
        in_graph()
    kr.remove_process_set(process_set)


def test_calls_of_ranks_outside_and_of_wrong_roots_are_refused(sets) -> None:
    outside = sets[0] if kr.rank() else (sets[1] if kr.size() > 1 else None)
    if outside is not None:
        with pytest.raises(
            kr.ConfigError,
            match=rf"barrier 'b': rank {kr.rank()} called it in ProcessSet\(.*which it is not in",
        ):
            kr.barrier(name="#b", process_set=outside)
        with pytest.raises(kr.ConfigError, match=f"rank {kr.rank()} is not in ProcessSet"):
            outside.rank()
    mine = next(s for s in sets if s.included())
    with pytest.raises(kr.ConfigError, match=r"root_rank is 77; expected one of \["):
        kr.broadcast([1.0], 77, process_set=mine)


def test_messages_name_ranks_of_the_world(sets) -> None:
    if kr.size() < 3:
        pytest.skip("needs a set of two that does not begin with rank 0")
    process_set = sets[1]
    if not process_set.included():
        return
    with pytest.raises(kr.MismatchError) as error:
        kr.allreduce(np.ones(kr.rank()), name="#odd", process_set=process_set)
    for rank in process_set.ranks:
        assert f"rank {rank} has " in str(error.value)


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1]])
def test_a_set_of_no_or_of_equal_ranks_is_refused(ranks) -> None:
    with pytest.raises(kr.ConfigError, match="ProcessSet: the ranks are"):
        kr.ProcessSet(ranks)


def test_adding_is_refused_on_every_rank_when_they_do_not_mean_the_same() -> None:
    with pytest.raises(kr.ConfigError, match=rf"expected ranks from 0 to {kr.size() - 1}"):
        kr.add_process_set([kr.size()])
    with pytest.raises(kr.ConfigError, match="is not there"):
        kr.remove_process_set(kr.ProcessSet([0]))
    if kr.size() > 1:
        with pytest.raises(kr.MismatchError, match=r"rank 0 has \[0\], rank 1 has \[1\]"):
            kr.add_process_set([kr.rank()])
    process_set = kr.add_process_set([0])
    with pytest.raises(kr.ConfigError, match="has been added already"):
        kr.add_process_set(process_set)
    kr.remove_process_set(process_set)
