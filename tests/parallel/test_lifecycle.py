"""init, shutdown, init again; communicators of one's own; threads, forks, memory and sleep."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr


@pytest.fixture
def comm() -> Any:
    from mpi4py import MPI

    if not MPI.Is_initialized():
        pytest.skip("started without mpirun: a world of one needs no MPI")
    return MPI.COMM_WORLD


@pytest.fixture
def left() -> Iterator[None]:
    """Leave the world for the time of a test."""
    kr.shutdown()
    yield
    kr.shutdown()
    kr.init()


def total_of_one() -> float:
    return float(kr.allreduce([1.0], "sum")[0])


def test_places_of_the_ranks_fit_together() -> None:
    places = kr.allgather_object(
        (kr.rank(), kr.local_rank(), kr.local_size(), kr.node_rank(), kr.num_nodes())
    )

    assert [place[0] for place in places] == list(range(kr.size()))
    assert {place[4] for place in places} == {len({place[3] for place in places})}
    for node in range(places[0][4]):
        on_node = [place for place in places if place[3] == node]
        assert [place[1] for place in on_node] == list(range(len(on_node)))
        assert {place[2] for place in on_node} == {len(on_node)}


def test_init_again_changes_nothing() -> None:
    before = (kr.rank(), kr.size())

    kr.init()

    assert (kr.rank(), kr.size()) == before
    assert total_of_one() == kr.size()


def test_init_after_shutdown_starts_a_new_generation() -> None:
    size = kr.size()
    for _ in range(5):
        assert total_of_one() == size
        kr.shutdown()
        assert not kr.is_initialized()
        kr.init()
        assert kr.is_initialized()
    assert total_of_one() == size


def test_shutdown_twice_does_nothing(left: None) -> None:
    kr.shutdown()
    kr.shutdown()

    assert not kr.is_initialized()


@pytest.mark.parametrize(
    "call",
    [
        kr.rank,
        kr.size,
        kr.local_rank,
        kr.local_size,
        kr.node_rank,
        kr.num_nodes,
        kr.barrier,
        lambda: kr.allreduce([1.0]),
        lambda: kr.grouped_allreduce([[1.0]]),
        lambda: kr.allgather([1.0]),
        lambda: kr.broadcast([1.0]),
        lambda: kr.broadcast_object(1),
        lambda: kr.allgather_object(1),
        lambda: kr.broadcast_variables([tf.Variable(1.0)]),
    ],
)
def test_call_without_init_names_init(left: None, call: Any) -> None:
    with pytest.raises(kr.ConfigError, match=r"not initialised; call keras_ring\.init\(\) first"):
        call()


def test_function_traced_before_shutdown_runs_after_init() -> None:
    call = tf.function(lambda x: kr.allreduce(x, "sum"))
    np.testing.assert_array_equal(call(tf.ones(2)), [kr.size()] * 2)

    kr.shutdown()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"call keras_ring\.init\(\) first"):
        call(tf.ones(2))
    kr.init()

    np.testing.assert_array_equal(call(tf.ones(2)), [kr.size()] * 2)


def test_function_traced_in_another_world_takes_the_mean_of_this_one(comm: Any, left: None) -> None:
    call = tf.function(lambda x: kr.allreduce(x, "mean"))
    kr.init()
    np.testing.assert_array_equal(call([float(kr.rank())]), [(kr.size() - 1) / 2])
    kr.shutdown()

    alone = comm.Split(color=comm.rank)
    kr.init(alone)
    np.testing.assert_array_equal(call([float(comm.rank)]), [comm.rank])
    kr.shutdown()
    alone.Free()


def test_init_with_a_sub_communicator_makes_worlds_of_their_own(comm: Any, left: None) -> None:
    color = comm.rank % 2
    half = comm.Split(color=color, key=-comm.rank)

    kr.init(half)

    assert (kr.rank(), kr.size()) == (half.rank, half.size)
    members = [rank for rank in range(comm.size) if rank % 2 == color]
    assert float(kr.allreduce([float(comm.rank)], "sum")[0]) == sum(members)
    assert kr.allgather_object(comm.rank) == members[::-1]
    kr.shutdown()
    half.Free()


def test_init_duplicates_the_communicator(comm: Any, left: None) -> None:
    """The user's own messages, on any tag, do not meet ours, and it may be freed at once."""
    own = comm.Dup()
    kr.init(own)
    right, before = (own.rank + 1) % own.size, (own.rank - 1) % own.size

    requests = [own.isend(("mine", own.rank, tag), dest=right, tag=tag) for tag in range(4)]
    assert total_of_one() == own.size
    received = [own.recv(source=before, tag=tag) for tag in range(4)]
    for request in requests:
        request.wait()
    assert received == [("mine", before, tag) for tag in range(4)]
    assert own.allreduce(1) == own.size

    own.Free()
    assert total_of_one() == kr.size()


def test_mpi4py_works_while_a_collective_waits(comm: Any) -> None:
    if comm.rank == 0:
        import threading

        thread = threading.Thread(target=kr.allreduce, args=([1.0],), kwargs={"name": "waits"})
        thread.start()
    for i in range(50):
        assert comm.allreduce(i) == i * comm.size
    if comm.rank == 0:
        thread.join(0.0 if comm.size > 1 else 60.0)
        assert thread.is_alive() == (comm.size > 1)
    if comm.rank != 0:
        kr.allreduce([1.0], name="waits")
    else:
        thread.join(60)


@pytest.mark.parametrize("wrong", [3, "world", object()])
def test_init_with_something_else_is_refused(left: None, wrong: Any) -> None:
    with pytest.raises(
        kr.ConfigError, match=r"init: comm is .*; expected an mpi4py\.MPI\.Intracomm"
    ):
        kr.init(wrong)
    assert not kr.is_initialized()


def test_init_with_the_null_communicator_is_refused(comm: Any, left: None) -> None:
    from mpi4py import MPI

    with pytest.raises(
        kr.ConfigError, match=r"init: comm is .*; expected an mpi4py\.MPI\.Intracomm"
    ):
        kr.init(MPI.COMM_NULL)


def collective_in_child(results: Any) -> None:
    try:
        results.put((kr.rank(), kr.size()))
        kr.allreduce([1.0])
    except kr.ConfigError as error:
        results.put(str(error))


def leave_child() -> None:
    raise SystemExit(0)


def test_forked_child_is_no_rank_and_does_not_disturb_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=collective_in_child, args=(results,)),
        context.Process(target=leave_child),
        context.Process(target=kr.shutdown),
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)

    assert [child.exitcode for child in children] == [0, 0, 0]
    assert results.get(timeout=10) == (kr.rank(), kr.size())
    message = results.get(timeout=10)
    assert f"allreduce 'allreduce': this process was forked from rank {kr.rank()} after" in message
    assert "start helpers with the 'spawn' method" in message
    assert total_of_one() == kr.size()


def test_rank_that_waits_sleeps() -> None:
    """CPU use of the whole process while it waits for rank 0, and of rank 0, which sleeps."""
    kr.barrier()
    cpu, wall = time.process_time(), time.monotonic()

    if kr.rank() == 0:
        time.sleep(3.0)
    kr.barrier()

    used, waited = time.process_time() - cpu, time.monotonic() - wall
    assert used < 0.05 * waited, f"{used:.3f} s of CPU in {waited:.1f} s"


def resident_kib() -> int:
    gc.collect()  # tracebacks hold on to arguments
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def test_memory_stays_flat_over_many_collectives() -> None:
    def run(count: int) -> None:
        for i in range(count):
            kr.allreduce(np.ones(1 + i * 37 % 5000, "float32"), name=f"memory/{i % 7}")

    run(1000)
    before = resident_kib()
    run(3000)
    after = resident_kib()

    assert after - before < 16 * 1024, f"grew by {after - before} KiB"


def test_errors_leave_no_memory_behind() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")

    # So large that the allocator gives each back to the system once freed: what stays is held.
    num_elems = 9_000_000

    def run(count: int) -> None:
        for i in range(count):
            with pytest.raises(kr.MismatchError):
                kr.allreduce(np.ones(num_elems + kr.rank(), "float32"), name=f"mismatch/{i}")

    run(3)
    before = resident_kib()
    run(20)  # 720 MB would be left if each call left its input
    after = resident_kib()

    assert after - before < 100 * 1024, f"grew by {after - before} KiB"


def test_file_descriptors_and_threads_do_not_pile_up_over_generations() -> None:
    def held() -> tuple[int, int]:
        return len([*Path("/proc/self/fd").iterdir()]), len([*Path("/proc/self/task").iterdir()])

    def renew() -> None:
        kr.shutdown()
        kr.init()
        kr.barrier()

    renew()
    before = held()
    for _ in range(4):
        renew()

    assert held() <= before
