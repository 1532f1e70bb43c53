"""Calls that are wrong: one sentence with the remedy on every rank, and the job goes on."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

needs_others = pytest.mark.usefixtures("_other_ranks")


@pytest.fixture
def _other_ranks() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")


def assert_next_collective_works() -> None:
    np.testing.assert_array_equal(kr.allreduce([1.0], "sum", name="next"), [kr.size()])


def is_last() -> bool:
    return kr.rank() == kr.size() - 1


DISAGREEMENTS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "shape": (
        lambda: kr.allreduce(np.zeros((3, 5 if is_last() else 4)), name="k#dense/kernel"),
        "shape",
        "(3, 4)",
        "(3, 5)",
    ),
    "rank of the shape": (
        lambda: kr.allreduce(np.zeros((4, 1) if is_last() else 4), name="k#dense/kernel"),
        "shape",
        "(4,)",
        "(4, 1)",
    ),
    "dtype": (
        lambda: kr.allreduce(
            tf.zeros(4, tf.float64 if is_last() else tf.float32), name="k#dense/kernel"
        ),
        "dtype",
        "float32",
        "float64",
    ),
    "operation": (
        lambda: kr.allreduce(np.zeros(4), "max" if is_last() else "sum", name="k#dense/kernel"),
        "operation",
        "sum",
        "max",
    ),
    "mean and sum": (
        lambda: kr.allreduce(np.zeros(4), "sum" if is_last() else "mean", name="k#dense/kernel"),
        "operation",
        "mean",
        "sum",
    ),
    "prescale_factor": (
        lambda: kr.allreduce(
            np.zeros(4), prescale_factor=0.5 if is_last() else 0.25, name="k#dense/kernel"
        ),
        "prescale_factor",
        "0.25",
        "0.5",
    ),
    "postscale_factor": (
        lambda: kr.allreduce(
            np.zeros(4), postscale_factor=2.0 if is_last() else 1.0, name="k#dense/kernel"
        ),
        "postscale_factor",
        "1",
        "2",
    ),
    "root": (
        lambda: kr.broadcast(np.zeros(4), int(is_last()), name="k#dense/kernel"),
        "root rank",
        "0",
        "1",
    ),
    "shape of a broadcast": (
        lambda: kr.broadcast(np.zeros(5 if is_last() else 4), name="k#dense/kernel"),
        "shape",
        "(4,)",
        "(5,)",
    ),
    "collective": (
        lambda: (kr.broadcast if is_last() else kr.allreduce)(np.zeros(4), name="k#dense/kernel"),
        "collective",
        "allreduce",
        "broadcast",
    ),
    "barrier": (
        lambda: (
            kr.barrier(name="k#dense/kernel")
            if is_last()
            else kr.allreduce(np.zeros(4), name="k#dense/kernel")
        ),
        "collective",
        "allreduce",
        "barrier",
    ),
    "number of tensors": (
        lambda: kr.grouped_allreduce(
            [np.zeros(2)] * (3 if is_last() else 2), name="k#dense/kernel"
        ),
        "number of tensors",
        "2",
        "3",
    ),
    "one shape of a group": (
        lambda: kr.grouped_allreduce(
            [np.zeros(2), np.zeros(3 if is_last() else 4)], name="k#dense/kernel"
        ),
        "shape of tensor 1",
        "(4,)",
        "(3,)",
    ),
    "row shape of an allgather": (
        lambda: kr.allgather(np.zeros((kr.rank(), 3 if is_last() else 2)), name="k#dense/kernel"),
        "shape",
        "(?, 2)",
        "(?, 3)",
    ),
    "shape of a reducescatter": (
        lambda: kr.reducescatter(np.zeros((4, 3 if is_last() else 2)), name="k#dense/kernel"),
        "shape",
        "(4, 2)",
        "(4, 3)",
    ),
    "operation of a reducescatter": (
        lambda: kr.reducescatter(
            np.zeros(4), "sum" if is_last() else "mean", name="k#dense/kernel"
        ),
        "operation",
        "mean",
        "sum",
    ),
    "sum and adasum": (
        lambda: kr.allreduce(np.zeros(4), "adasum" if is_last() else "sum", name="k#dense/kernel"),
        "operation",
        "sum",
        "adasum",
    ),
    "row shape of an alltoall": (
        lambda: kr.alltoall(np.zeros((kr.size(), 3 if is_last() else 2)), name="k#dense/kernel"),
        "shape",
        "(?, 2)",
        "(?, 3)",
    ),
    "splits or none": (
        lambda: kr.alltoall(
            np.zeros(kr.size()),
            None if is_last() else [1] * kr.size(),
            name="k#dense/kernel",
        ),
        "splits",
        "some",
        "none",
    ),
    "alltoall and reducescatter": (
        lambda: (kr.reducescatter if is_last() else kr.alltoall)(
            np.zeros(kr.size()), name="k#dense/kernel"
        ),
        "collective",
        "alltoall",
        "reducescatter",
    ),
    "dtype of an allgather": (
        lambda: kr.allgather(
            tf.zeros((1, 2), tf.int64 if is_last() else tf.int32), name="k#dense/kernel"
        ),
        "dtype",
        "int32",
        "int64",
    ),
}


@needs_others
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_disagreement_is_an_error_on_every_rank_within_a_second(case: str) -> None:
    call, what, first, last = DISAGREEMENTS[case]
    kr.barrier(name="together")
    start = time.monotonic()

    with pytest.raises(kr.MismatchError) as caught:
        call()

    assert time.monotonic() - start < 1.0
    others = (
        "rank 0 has"
        if kr.size() == 2
        else ("ranks " + ", ".join(str(r) for r in range(kr.size() - 1)) + " have")
    )
    expected = (
        f" 'dense/kernel': ranks disagree on {what}: {others} {first}, "
        f"rank {kr.size() - 1} has {last}. Build the same model"
    )
    assert expected in str(caught.value)
    assert_next_collective_works()


@needs_others
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_splits_that_do_not_fit_on_one_rank_are_an_error_on_every_rank(is_graph: bool) -> None:
    """Nobody waits for the rank that cannot send."""
    splits = [1] * kr.size() if not is_last() else [2] * kr.size()

    def call() -> Any:
        return kr.alltoall(np.zeros((kr.size(), 2)), splits, name="k#tokens")

    with pytest.raises((kr.ConfigError, tf.errors.InvalidArgumentError)) as caught:
        (tf.function(call) if is_graph else call)()

    error = kr.errors.from_tf(caught.value) if is_graph else caught.value
    assert isinstance(error, kr.ConfigError)
    twos = ", ".join(["2"] * kr.size())
    assert (
        f"alltoall 'tokens': rank {kr.size() - 1} has called it wrongly: its splits ({twos}) are "
        f"not a way to cut its tensor of {kr.size()} rows; expected numbers from 0 on"
    ) in str(error)
    assert_next_collective_works()


@needs_others
def test_disagreement_of_many_ranks_names_them_all() -> None:
    with pytest.raises(kr.MismatchError) as caught:
        kr.allreduce(np.zeros(10 + kr.rank()), name="own shape")

    for rank in range(kr.size()):
        assert f"rank {rank} has ({10 + rank},)" in str(caught.value)


@needs_others
def test_disagreement_on_a_known_name_is_noticed() -> None:
    """A name that has been agreed on before comes with another shape on one rank."""
    for _ in range(3):
        kr.allreduce(np.zeros(4), name="known")

    with pytest.raises(kr.MismatchError, match="ranks disagree on shape"):
        kr.allreduce(np.zeros(5 if kr.rank() == 0 else 4), name="known")

    np.testing.assert_array_equal(kr.allreduce(np.ones(4), "sum", name="known"), [kr.size()] * 4)
    np.testing.assert_array_equal(kr.allreduce(np.ones(5), "sum", name="known"), [kr.size()] * 5)


@needs_others
def test_disagreement_in_one_thread_leaves_another_s_request_alone() -> None:
    """Eager calls do not belong to one run of a graph, so nothing else is given up."""
    results: list[float] = []
    release = threading.Event()

    def wait_for_the_others() -> None:
        if kr.rank() == 0:
            release.wait(60)
        results.append(float(kr.allreduce([1.0], "sum", name="patient")[0]))

    thread = threading.Thread(target=wait_for_the_others)
    thread.start()
    with pytest.raises(kr.MismatchError):
        kr.allreduce(np.zeros(2 + kr.rank()), name="hasty")
    release.set()
    thread.join(60)

    assert results == [kr.size()]


@needs_others
def test_disagreement_in_a_graph_gives_up_the_others_of_its_run() -> None:
    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        results = [kr.allreduce(x + i, "sum", name=f"fine/{i}") for i in range(5)]
        if kr.rank() == 0:  # its last one is never submitted: it waits for the one that fails
            with tf.control_dependencies([kr.allreduce(tf.zeros(3), name="bad#bad/kernel")]):
                return [*results, kr.allreduce(x + 9, name="late")]
        bad = kr.allreduce(tf.zeros(4), name="bad#bad/kernel")
        return [*results, kr.allreduce(x + 9, name="late") + bad[0]]

    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            step(tf.ones(7))
        assert time.monotonic() - start < (1.0 if _ else 10.0)  # the first call traces

        error = kr.errors.from_tf(caught.value)
        assert isinstance(error, kr.MismatchError)
        assert "'bad/kernel': ranks disagree on shape: rank 0 has (3,), rank" in str(error)
        assert "{{node" not in str(error)
        assert_next_collective_works()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype string": (
        lambda: kr.allreduce(tf.constant(["a"]), name="x#table"),
        r"allreduce 'table': dtype string is not supported; expected one of \[.*'float32'.*\]\. "
        "For Python objects use broadcast_object or allgather_object",
    ),
    "dtype of an allgather": (
        lambda: kr.allgather(tf.constant(["a"]), name="x#table"),
        "allgather 'table': dtype string is not supported",
    ),
    "dtype of a broadcast": (
        lambda: kr.broadcast(tf.constant("a"), name="x#table"),
        "broadcast 'table': dtype string is not supported",
    ),
    "negative root": (
        lambda: kr.broadcast([1.0], -1, name="x#bias"),
        "broadcast 'bias': root_rank is -1; expected a rank from 0 to",
    ),
    "root past the last": (
        lambda: kr.broadcast([1.0], kr.size(), name="x#bias"),
        r"broadcast 'bias': root_rank is \d; expected a rank from 0 to",
    ),
    "root that is no number": (
        lambda: kr.broadcast([1.0], "0", name="x#bias"),
        "broadcast 'bias': root_rank is '0'; expected a rank from 0 to",
    ),
    "root between two": (
        lambda: kr.broadcast([1.0], 0.5, name="x#bias"),
        r"broadcast 'bias': root_rank is 0\.5; expected a rank from 0 to",
    ),
    "scalar to allgather": (
        lambda: kr.allgather(1.0, name="x#loss"),
        r"allgather 'loss' takes tensors with at least one dimension, but got a scalar; reshape",
    ),
    "unknown operation": (
        lambda: kr.allreduce([1.0], "average", name="x#bias"),
        r"allreduce 'bias': op='average' is unknown; expected one of \('mean', 'sum', ",
    ),
    "scaled maximum": (
        lambda: kr.allreduce([1.0], "max", prescale_factor=2.0, name="x#bias"),
        "allreduce 'bias': prescale_factor=2.0 and .* go with op='mean' or 'sum', not 'max'",
    ),
    "scalar to reducescatter": (
        lambda: kr.reducescatter(1.0, name="x#loss"),
        "reducescatter 'loss' takes tensors with at least one dimension, but got a scalar",
    ),
    "scalar to alltoall": (
        lambda: kr.alltoall(1.0, name="x#loss"),
        "alltoall 'loss' takes tensors with at least one dimension, but got a scalar",
    ),
    "adasum as reducescatter": (
        lambda: kr.reducescatter([1.0], "adasum", name="x#bias"),
        r"reducescatter 'bias': op='adasum' is unknown; expected one of \('mean', 'sum', ",
    ),
    "adasum of integers": (
        lambda: kr.allreduce([1], "adasum", name="x#steps"),
        "allreduce 'steps': op='adasum' has no meaning for dtype int32; use a floating dtype",
    ),
    "maximum of complex numbers": (
        lambda: kr.reducescatter(tf.zeros(2, tf.complex64), "max", name="x#waves"),
        "reducescatter 'waves': op='max' has no meaning for dtype complex64; use op='sum'",
    ),
    "scaled minimum": (
        lambda: kr.reducescatter([1.0], "min", postscale_factor=2.0, name="x#bias"),
        "reducescatter 'bias': prescale_factor=1.0 and postscale_factor=2.0 go with op='mean'",
    ),
    "splits of another dtype": (
        lambda: kr.alltoall([1.0], [1.0], name="x#tokens"),
        r"alltoall 'tokens': splits are float32 of shape \(1,\); expected int32 or int64 of shape",
    ),
    "too many splits": (
        lambda: kr.alltoall([1.0], [1] + [0] * kr.size(), name="x#tokens"),
        r"splits \(1, 0.*\) are \d numbers; expected one for each of the \d ranks\.",
    ),
    "splits of fewer rows": (
        lambda: kr.alltoall(np.zeros(9), [1] * kr.size(), name="x#tokens"),
        r"splits \(1,.*\) are not a way to cut its tensor of 9 rows; expected numbers",
    ),
    "sum of bools": (
        lambda: kr.allreduce([True], "sum", name="x#mask"),
        r"allreduce 'mask': op='sum' has no meaning for dtype bool; use op='min' \(all\) or",
    ),
}


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_is_refused_with_the_remedy(case: str, is_graph: bool) -> None:
    call, message = WRONG[case]

    with pytest.raises((kr.ConfigError, tf.errors.InvalidArgumentError)) as caught:
        (tf.function(call) if is_graph else call)()

    # In a graph it is TensorFlow's own class if it is refused only when it runs.
    error = kr.errors.from_tf(caught.value) if is_graph else caught.value
    assert isinstance(error, kr.ConfigError)
    assert re.search(message, str(error))
    assert_next_collective_works()


def test_scalar_of_unknown_rank_to_allgather_is_refused_when_it_runs() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def gather(x: tf.Tensor) -> tf.Tensor:
        return kr.allgather(x, name="x#loss")

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        gather(tf.constant(1.0))

    message = "allgather 'loss' takes tensors with at least one dimension"
    assert message in str(kr.errors.from_tf(caught.value))
    assert gather(tf.ones((2, 3))).shape == (2 * kr.size(), 3)


@needs_others
def test_name_in_flight_twice_on_a_rank_is_refused() -> None:
    def call() -> float:
        return float(kr.allreduce([1.0], "sum", name="same#same/kernel")[0])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call) for _ in range(2 if kr.rank() == 0 else 0)]
        first_to_end = concurrent.futures.wait(
            calls, 60, return_when=concurrent.futures.FIRST_COMPLETED
        ).done
        kr.barrier(name="go")
        calls += [pool.submit(call) for _ in range(0 if kr.rank() == 0 else 1)]
        outcomes = {repr(future.exception(60) or future.result(60)) for future in calls}

    refusal = repr(
        kr.ConfigError(
            "allreduce 'same/kernel' was called while a call under the same name 'same' had not "
            "ended on rank 0. Give calls that run side by side names of their own."
        )
    )
    assert [repr(future.exception()) for future in first_to_end] == [refusal] * (kr.rank() == 0)
    assert outcomes - {refusal} == {repr(float(kr.size()))}
    assert_next_collective_works()
