"""The call of `fit` that is going on, and which ranks are in it together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras

from keras_ring import runtime
from keras_ring.fitting.agreement import SCOPE, Group
from keras_ring.fitting.hooks import hook_method
from keras_ring.process_sets import size_of
from keras_ring.reducer import leaves, reducer_of

_PROGRAM = (
    "Every rank that trains with a distributed optimizer must call fit with the same epochs, and "
    "with the same callbacks of keras_ring."
)
_running = threading.local()


class Fit:
    """One call of `model.fit`.

    Args:
        model: The model.
        data: What it was given as `x`.
        group: The ranks that train it together; None if this rank trains alone.
    """

    def __init__(self, model: Any, data: Any, group: Group | None) -> None:
        self.model = model
        self.data = data
        self.group = group
        # Keras's iterator over the training batches, and its list of callbacks.
        self.iterator: Any = None
        self.callback_list: Any = None
        # Batches at the beginning of the next epoch that have been trained on already.
        self.num_to_skip = 0
        # Epochs before the next one that another process has trained, and what is called when the
        # data has come to where it was then.
        self.num_epochs_to_replay = 0
        self.when_rewound: Callable[[], None] | None = None
        # Called with the epoch's number when all callbacks have ended it.
        self.after_epoch: list[Callable[[int], None]] = []
        # Batches of this epoch that have been trained on, and whether it has no more of them.
        self.num_batches_done = 0
        self.has_no_more = False
        # Ranks whose data ended while that of others had not.
        self.ended_ranks: list[int] = []
        self.num_batches_of_ended = 0
        self.has_warned_of_end = False
        # Whether it shows only in the end how many batches an epoch has.
        self.is_open = False
        # How many steps the optimizers had counted before the step that is going on, where that may
        # find no batch.
        self.iterations: list[tuple[Any, int]] = []
        # Callbacks that have not been given the model yet: this rank may not need them.
        self.held: list[Any] = []
        # Logs of the epoch that ends: this rank's own, and the means over the ranks.
        self.own_logs: dict[str, float] = {}
        self.mean_logs: dict[str, float] = {}

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, if that is known."""
        known = None if self.iterator is None else self.iterator.num_batches
        return None if known is None else int(known)


def patch() -> None:
    """Hook `fit`, once."""
    hook_method(_owner_of_fit(), "fit", _fit)


def of(model: Any) -> Fit | None:
    """Return the innermost `fit` of this thread, if it trains `model`."""
    running = getattr(_running, "fits", None)
    return running[-1] if running and running[-1].model is model else None


def innermost() -> Fit | None:
    """Return the innermost `fit` of this thread."""
    running = getattr(_running, "fits", None)
    return running[-1] if running else None


def group_of(model: Any) -> Group | None:
    """Return the ranks that train a model together; None if this rank trains alone."""
    if is_in_scope(model):
        return SCOPE
    for optimizer in optimizers_of(model):
        for reducer in map(reducer_of, [optimizer, *leaves(optimizer)]):
            if reducer is None or reducer.is_adopted or not runtime.is_initialized():
                continue
            process_set = reducer.reduction.process_set
            if size_of(process_set) > 1:
                return Group("fit", _PROGRAM, has_own_data=True, process_set=process_set)
    return None


def is_in_scope(model: Any) -> bool:
    """Return whether a model was made in the scope of a RingStrategy of several ranks."""
    return _is_of_strategy(model) and runtime.size() > 1


def is_distributed(model: Any) -> bool:
    """Return whether a model trains through keras_ring, on one rank as on many."""
    reducers = (reducer_of(o) for own in optimizers_of(model) for o in [own, *leaves(own)])
    return _is_of_strategy(model) or any(reducer is not None for reducer in reducers)


def _is_of_strategy(model: Any) -> bool:
    strategy = getattr(model, "_distribute_strategy", None)
    return bool(getattr(strategy, "is_keras_ring", False))


def optimizers_of(model: Any) -> list[Any]:
    """Return a model's optimizers: the one of `compile`, and those that are its attributes."""
    kind = keras.optimizers.Optimizer
    own = getattr(model, "optimizer", None)
    found = {id(o): o for o in [own, *vars(model).values()] if isinstance(o, kind)}
    return list(found.values())


def _owner_of_fit() -> Any:
    return next(cls for cls in keras.Model.__mro__ if "fit" in vars(cls))


def _fit(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if not hasattr(_running, "fits"):
        _running.fits = []
    data = args[0] if args else kwargs.get("x")
    _running.fits.append(Fit(self, data, group_of(self)))
    try:
        return plain(self, *args, **kwargs)
    finally:
        _running.fits.pop()
