"""How many steps an epoch has: as many on every rank, where each brings batches of its own.

A rank that took one step more would wait for gradients that nobody sends. So an epoch ends on all
ranks with the first of them that has no more batches, and each step averages the gradients of all
ranks. Lengths that are known are compared when `fit` begins; where one is not, the ranks ask one
another before each batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from keras_ring import collectives
from keras_ring.errors import ConfigError
from keras_ring.fitting import fits
from keras_ring.fitting.agreement import Group, check_equal, list_ranks, share_error
from keras_ring.fitting.hooks import hook_method
from keras_ring.process_sets import rank_in
from keras_ring.reducer import leaves

_FIT = "_keras_ring_fit"
_NUM_BATCHES = "_keras_ring_num_batches"
_REMEDY = (
    "so that each step averages the gradients of all ranks. Give the ranks shards of equal length, "
    "or steps_per_epoch."
)


def patch() -> None:
    """Hook Keras's iterator over an epoch's batches, once."""
    iterator = trainer.TFEpochIterator
    hook_method(iterator, "__init__", _make)
    hook_method(iterator, "reset", _reset)
    hook_method(iterator, "_enumerate_iterator", _enumerate)
    hook_method(iterator, "catch_stop_iteration", _catch_stop_iteration)


def _make(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the first iterator of a `fit`, that of the training, one that the ranks share."""
    fit = fits.innermost()
    if fit is None or fit.iterator is not None:
        plain(self, *args, **kwargs)
        return
    fit.iterator = self
    vars(self)[_FIT] = fit
    group = fit.group
    if group is None or not group.has_own_data:
        plain(self, *args, **kwargs)
        fit.is_open = fits.is_distributed(fit.model) and _is_open(_length_of(self))
        return
    error = None
    try:
        plain(self, *args, **kwargs)
    except Exception as raised:  # noqa: BLE001 - the others are told of any
        error = raised
    what = "begins fit"
    lengths = share_error(
        group,
        what,
        error,
        None if error is not None else _length_of(self),
        where="with the data of fit",
    )
    _keep_in_step(self, fit, group, what, lengths)


def _length_of(iterator: Any) -> dict[str, Any]:
    """Return what the ranks must know of one another's data."""
    dataset = iterator._distributed_dataset
    cardinality = getattr(dataset, "cardinality", None)
    is_infinite = (
        iterator._num_batches is None
        and callable(cardinality)
        and int(cardinality()) == tf.data.INFINITE_CARDINALITY
    )
    return {
        "batches": iterator._num_batches,
        "is infinite": is_infinite,
        "steps_per_epoch": iterator.steps_per_epoch,
        "steps_per_execution": int(iterator.steps_per_execution),
    }


def _is_open(length: dict[str, Any]) -> bool:
    """Return whether it shows only in the end how many batches there are."""
    return length["batches"] is None and not length["is infinite"]


def _keep_in_step(
    iterator: Any, fit: fits.Fit, group: Group, what: str, lengths: list[dict[str, Any]]
) -> None:
    can_be_cut = isinstance(iterator._distributed_dataset, tf.data.Dataset)
    check_equal(
        group,
        what,
        [
            {
                "steps_per_execution": length["steps_per_execution"],
                "has steps_per_epoch": length["steps_per_epoch"] is not None,
            }
            for length in lengths
        ],
        advice="Give compile and fit the same arguments on every rank.",
    )
    without = [r for r, length in zip(group.ranks, lengths, strict=True) if length["batches"] == 0]
    if without:
        raise ConfigError(
            f"fit: the data of {list_ranks(without)} has no batch at all; expected at least one on "
            "every rank. Give every rank a part of the data, or start fewer ranks."
        )
    known = [length["batches"] for length in lengths if length["batches"] is not None]
    if known:
        vars(iterator)[_NUM_BATCHES] = min(known)
        if iterator._num_batches != min(known) and can_be_cut:
            # With steps_per_execution Keras goes by the data, and not by their number.
            iterator._distributed_dataset = iterator._distributed_dataset.take(min(known))
        iterator._num_batches = min(known)
    if iterator.steps_per_epoch is not None:
        iterator.steps_per_epoch = min(length["steps_per_epoch"] for length in lengths)
    if group.is_root:
        _warn_of_lengths(group, lengths)
    fit.is_open = any(map(_is_open, lengths))
    if fit.is_open and can_be_cut:
        iterator._distributed_dataset = _ending_together(iterator._distributed_dataset, fit, group)


def _warn_of_lengths(group: Group, lengths: list[dict[str, Any]]) -> None:
    counts = {
        rank: length["steps_per_epoch"] or length["batches"]
        for rank, length in zip(group.ranks, lengths, strict=True)
    }
    known = {rank: count for rank, count in counts.items() if count is not None}
    if len(set(known.values())) < 2:
        return
    listed = ", ".join(f"rank {rank} has {count}" for rank, count in known.items())
    warnings.warn(
        f"fit: the ranks have different numbers of batches in an epoch: {listed}. Each epoch ends "
        f"after {min(known.values())} on all ranks, {_REMEDY}",
        stacklevel=2,
    )


def _ending_together(dataset: Any, fit: fits.Fit, group: Group) -> Any:
    """Return the dataset up to where that of the first rank ends."""
    spec = dataset.element_spec
    optional = tf.experimental.Optional

    def full(*batch: Any) -> Any:
        return optional.from_value(batch if isinstance(spec, tuple) else batch[0])

    def note(num_batches: Any, has_more: Any) -> Any:
        fit.num_batches_of_ended = int(num_batches)
        fit.ended_ranks = [r for r, more in zip(group.ranks, has_more, strict=True) if not more]
        return np.array(False)

    def all_have_more(num_batches: Any, batch: Any) -> Any:
        own = tf.one_hot(rank_in(group.process_set), group.size, dtype=tf.int32)
        has_more = collectives.allreduce(
            tf.where(batch.has_value(), own, tf.zeros_like(own)),
            "sum",
            name="fit/end of data#end of data",
            process_set=group.process_set,
        )
        goes_on = tf.cond(
            tf.reduce_all(has_more > 0),
            lambda: tf.constant(True),
            lambda: tf.numpy_function(note, [num_batches, has_more], tf.bool),
        )
        return tf.ensure_shape(goes_on, [])

    end = tf.data.Dataset.from_tensors(optional.empty(spec))
    marked = dataset.map(full).concatenate(end)
    # Read ahead below, never above: a rank that asks the others when its program does not ask for a
    # batch would wait for ranks that have stopped. tf.data would put a prefetch at the end, and run
    # a last `map` in parallel, by itself.
    batches = (
        marked.enumerate()
        .take_while(all_have_more)
        .flat_map(lambda _, batch: tf.data.Dataset.from_tensors(batch.get_value()))
    )
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return batches.with_options(options)


def _reset(plain: Callable[..., Any], self: Any) -> None:
    plain(self)
    num_batches = vars(self).get(_NUM_BATCHES)
    if num_batches is not None:
        self._num_batches = num_batches


def _enumerate(plain: Callable[..., Any], self: Any) -> Iterator[Any]:
    """Go through an epoch, past the batches that were trained on before."""
    fit = vars(self).get(_FIT)
    if fit is None:
        yield from plain(self)
        return
    _replay(plain, self, fit)
    fit.num_batches_done = fit.num_to_skip
    fit.has_no_more = False
    fit.ended_ranks = []
    for begin, end, iterator in plain(self):
        if begin < fit.num_to_skip:
            try:
                for _ in range(begin, end + 1):
                    next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            continue
        if fit.when_rewound is not None:
            # Once more: batches that were skipped may have drawn random numbers.
            fit.when_rewound()
            fit.when_rewound = None
        if fit.is_open:
            fit.iterations = [(v, int(v)) for v in _counters(fit.model)]
        yield begin, end, iterator
    fit.num_to_skip = 0
    fit.has_no_more = True


def _replay(plain: Callable[..., Any], iterator: Any, fit: fits.Fit) -> None:
    """Bring the data to where it was after epochs that another process has trained.

    Shuffles draw their next order each time the data is begun, and a PyDataset at an epoch's end.
    No batch is read for that, unless the data goes on from one epoch to the next.
    """
    adapter = iterator.data_adapter
    # It would begin to read ahead.
    enqueuer = vars(adapter).get("enqueuer")
    if enqueuer is not None:
        adapter.enqueuer = None
    for _ in range(fit.num_epochs_to_replay):
        for begin, end, batches in plain(iterator):
            if iterator.steps_per_epoch:
                try:
                    for _ in range(begin, end + 1):
                        next(batches)
                except (StopIteration, tf.errors.OutOfRangeError):
                    iterator._current_iterator = None
                    adapter.on_epoch_end()
                    break
            elif not iterator._num_batches:
                # It has no end that could be come to without reading.
                adapter.on_epoch_end()
                break
    if enqueuer is not None:
        adapter.enqueuer = enqueuer
    if fit.when_rewound is not None:
        fit.when_rewound()
    fit.num_epochs_to_replay = 0


@contextlib.contextmanager
def _catch_stop_iteration(plain: Callable[..., Any], self: Any) -> Iterator[None]:
    fit = vars(self).get(_FIT)
    with plain(self):
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            if fit is not None:
                fit.has_no_more = True
                # The step that found no batch may have counted itself, or not, as it happens: the
                # ranks' optimizers would go on from different steps.
                for variable, value in fit.iterations:
                    variable.assign(value)
            raise
    if fit is not None:
        fit.num_to_skip = 0
        _warn_of_end(fit)


def _counters(model: Any) -> list[Any]:
    """Return the variables in which a model's optimizers count their steps."""
    every = [leaf for optimizer in fits.optimizers_of(model) for leaf in leaves(optimizer)]
    return list({id(v): v for v in (optimizer.iterations for optimizer in every)}.values())


def _warn_of_end(fit: fits.Fit) -> None:
    """Say, once, that the data of some ranks ended before that of others."""
    group = fit.group
    if group is None or not fit.ended_ranks or fit.has_warned_of_end:
        return
    others = [rank for rank in group.ranks if rank not in fit.ended_ranks]
    if not others:
        return
    fit.has_warned_of_end = True
    if group.is_root:
        warnings.warn(
            f"fit: after {fit.num_batches_of_ended} batches {list_ranks(fit.ended_ranks)} had no "
            f"more, while {list_ranks(others)} had. The epoch ends there on all ranks, {_REMEDY}",
            stacklevel=2,
        )
