"""When callbacks stop training or change the learning rate: on all ranks, or on none.

Ranks may have different callbacks, and those of one rank may see what others do not. What a
callback on one rank decides, all ranks follow: one that stopped alone would leave the others
waiting, and one that went on at another learning rate would drift away from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ring import collectives
from keras_ring.errors import ConfigError, PeerLostError, StallError
from keras_ring.fitting import fits, monitors, writers
from keras_ring.fitting.agreement import SCOPE, Group, check_equal, gather, share_error
from keras_ring.fitting.hooks import hook_method
from keras_ring.reducer import local_variables
from keras_ring.reduction import identity
from keras_ring.variables import broadcast_variables

_STATE = "_keras_ring_together"
# They stop nothing in the course of an epoch.
_QUIET = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
)
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
# After these there is nobody to tell.
_LOST = (PeerLostError, StallError, tf.errors.UnavailableError, tf.errors.DeadlineExceededError)


class _Together:
    """What the ranks have told one another of the callbacks of one training."""

    def __init__(self, group: Group, ranks: Sequence[dict[str, Any]]) -> None:
        self.group = group
        self.may_stop_in_epoch = any(own["may stop in an epoch"] for own in ranks)
        self.has_monitors = any(own["has monitors"] for own in ranks)
        self.has_same_lists = all(own["callbacks"] == ranks[0]["callbacks"] for own in ranks)
        self.average: Any = None
        # The ranks whose callbacks restore the best weights, if not all have such.
        restoring = [r for r, own in zip(group.ranks, ranks, strict=True) if own["restores best"]]
        self.restoring = restoring if len(restoring) < group.size else []


def patch() -> None:
    """Hook Keras's list of callbacks, once."""
    cls = keras.callbacks.CallbackList
    hook_method(cls, "set_model", _set_model)
    hook_method(cls, "on_train_begin", _on_train_begin)
    hook_method(cls, "on_train_batch_end", _on_train_batch_end)
    hook_method(cls, "on_epoch_begin", _on_epoch_begin)
    hook_method(cls, "on_epoch_end", _on_epoch_end)
    hook_method(cls, "on_train_end", _on_train_end)


def _group_of(callback_list: Any) -> Group | None:
    """Return the ranks that go through the list together.

    Within a scope that is so outside of `fit` too. With a distributed optimizer a rank may have a
    list of its own, for a loop or for evaluate.
    """
    fit = fits.of(callback_list.model)
    if fit is not None:
        return fit.group
    return SCOPE if fits.is_in_scope(callback_list.model) else None


def _set_model(plain: Callable[..., Any], self: Any, model: Any) -> None:
    fit = fits.of(model)
    group = fit.group if fit is not None else None
    if fits.is_in_scope(model) and not SCOPE.is_root:
        self.callbacks = [c for c in self.callbacks if not writers.is_logger(c)]
    elif fit is not None and fit.callback_list is None and group is not None and not group.is_root:
        # Some write as soon as they see the model; on_train_begin knows whether they may.
        everything = self.callbacks
        fit.held = [c for c in everything if writers.is_logger(c)]
        self.callbacks = [c for c in everything if c not in fit.held]
        plain(self, model)
        self.callbacks = everything
        fit.callback_list = self
        return
    if fit is not None and fit.callback_list is None:
        fit.callback_list = self
    plain(self, model)


def _on_train_begin(plain: Callable[..., Any], self: Any, logs: Any = None) -> None:
    group = _group_of(self)
    fit = fits.of(self.model)
    if fit is not None:
        fit.callback_list = self
    if group is None:
        plain(self, logs)
        return
    what = "begins to train"
    ours = [type(c).__name__ for c in self.callbacks if _is_ours(c)]
    ranks = gather(
        group,
        what,
        {
            "same": {
                "epochs": (self.params or {}).get("epochs"),
                "callbacks of keras_ring": ours,
            },
            "may stop in an epoch": any(map(_may_stop_in_epoch, self.callbacks)),
            "callbacks": [type(c).__name__ for c in self.callbacks],
            "has monitors": any(map(monitors.is_monitor, self.callbacks)),
            "restores best": any(map(_restores_best, self.callbacks)),
            "writes": [writers.target_of(c) for c in self.callbacks if writers.is_writer(c)],
        },
    )
    check_equal(
        group,
        what,
        [own["same"] for own in ranks],
        advice="Give fit the same arguments on every rank.",
    )
    state = vars(self)[_STATE] = _Together(group, ranks)
    dropped = writers.decide(self.callbacks, group, ranks[0]["writes"], self.model)
    self.callbacks = [c for c in self.callbacks if c not in dropped]
    for callback in [] if fit is None else fit.held:
        if callback not in dropped:
            callback.set_model(self.model)
    if fit is not None and group.has_own_data and state.has_monitors:
        state.average = monitors.Average(fit, group)
        self.callbacks.insert(_place_of_average(self.callbacks, state), state.average)
    _begin(plain, self, logs, group)


def _place_of_average(callbacks: Sequence[Any], state: _Together) -> int:
    """Return where in the list the ranks exchange what their monitors are to see.

    As late as can be, so that it holds what earlier callbacks have put into the logs; but where the
    ranks' lists differ, before any callback in which ranks may wait for one another.
    """
    if not state.has_same_lists:
        return 0
    return next(i for i, callback in enumerate(callbacks) if monitors.is_monitor(callback))


def _begin(plain: Callable[..., Any], self: Any, logs: Any, group: Group) -> None:
    """Let callbacks begin, and all ranks from where the root's have put it."""
    error = _error_of(lambda: plain(self, logs))
    model = self.model
    own = (model._initial_epoch, any(map(writers.has_restored, self.callbacks)))
    begun = share_error(
        group, "has begun to train", error, own, where="in a callback when training began"
    )
    if all(other == begun[0] for other in begun):
        return
    # BackupAndRestore found a backup on some ranks only, or another one: the root decides.
    local = [v for optimizer in fits.optimizers_of(model) for v in local_variables(optimizer)]
    if local:
        lacking = [r for r, other in zip(group.ranks, begun, strict=True) if other != begun[0]]
        raise ConfigError(
            f"{group.who}: rank {group.root} goes on from a backup at epoch {begun[0][0]}, and "
            f"rank {lacking[0]} does not find the same; it needs its own, because the optimizer "
            "leaves layers to each rank. Bring back the ranks' backups, or remove all of them."
        )
    model._initial_epoch = begun[0][0]
    _take_over(model, group, group.root)


def _take_over(model: Any, group: Group, root: int) -> None:
    """Give all ranks the model and the optimizers of one."""
    optimizers = fits.optimizers_of(model)
    own = getattr(model, "optimizer", None)
    if own is not None and model.built and not own.built:
        own.build(model.trainable_variables)
    # With data of its own each rank draws its own dropout masks, too.
    variables = list(model.weights if group.has_own_data else model.variables)
    variables += [v for optimizer in optimizers for v in optimizer.variables]
    local = {identity(v) for optimizer in optimizers for v in local_variables(optimizer)}
    broadcast_variables(
        [v for v in variables if identity(v) not in local],
        root,
        name="fit/restore",
        process_set=group.process_set,
    )


def _is_ours(callback: Any) -> bool:
    return type(callback).__module__.startswith("keras_ring.")


def _may_stop_in_epoch(callback: Any) -> bool:
    if type(callback) in _QUIET or _is_ours(callback):
        return False
    return any(
        hook in vars(callback)
        or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
        for hook in _BATCH_HOOKS
    )


def _restores_best(callback: Any) -> bool:
    is_stopping = isinstance(callback, keras.callbacks.EarlyStopping)
    return is_stopping and bool(callback.restore_best_weights)


def _error_of(call: Callable[[], Any]) -> Exception | None:
    """Call, and return what it raises, if the others are to be told of it."""
    try:
        call()
    except _LOST:
        raise
    except Exception as error:  # noqa: BLE001 - a user's callback may raise anything
        return error
    return None


def _on_train_batch_end(plain: Callable[..., Any], self: Any, batch: int, logs: Any = None) -> None:
    fit = fits.of(self.model)
    if fit is not None:
        fit.num_batches_done = batch + 1
    state = vars(self).get(_STATE)
    if state is None or not state.may_stop_in_epoch:
        plain(self, batch, logs)
        return
    error = _error_of(lambda: plain(self, batch, logs))
    own = 2 if error is not None else int(bool(self.model.stop_training))
    stop = collectives.allreduce(
        tf.constant(own, tf.int32),
        "max",
        name="fit/stop#model.stop_training",
        process_set=state.group.process_set,
    )
    if int(stop) == 2:
        share_error(
            state.group, "fails", error, where=f"in a callback when batch {batch + 1} ended"
        )
    self.model.stop_training = bool(stop)


def _on_epoch_begin(plain: Callable[..., Any], self: Any, epoch: int, logs: Any = None) -> None:
    state = vars(self).get(_STATE)
    if state is None:
        plain(self, epoch, logs)
        return
    before = _learning_rate(self.model)
    error = _error_of(lambda: plain(self, epoch, logs))
    ranks = share_error(
        state.group,
        "begins an epoch",
        error,
        (before, _learning_rate(self.model)),
        where=f"in a callback when epoch {epoch + 1} began",
    )
    # Where they were different before, BroadcastInitialWeights may be about to make them equal.
    if all(rates[0] == ranks[0][0] for rates in ranks):
        _agree_on_learning_rate(
            self.model, state.group, ranks, f"at the start of epoch {epoch + 1}"
        )


def _on_epoch_end(plain: Callable[..., Any], self: Any, epoch: int, logs: Any = None) -> None:
    _end_epoch_together(plain, self, epoch, logs)
    fit = fits.of(self.model)
    for call in [] if fit is None else fit.after_epoch:
        call(epoch)


def _end_epoch_together(plain: Callable[..., Any], self: Any, epoch: int, logs: Any) -> None:
    state = vars(self).get(_STATE)
    if state is None:
        plain(self, epoch, logs)
        return
    group = state.group
    before = _learning_rate(self.model)
    error = _error_of(lambda: plain(self, epoch, logs))
    ranks = share_error(
        group,
        "ends an epoch",
        error,
        (before, _learning_rate(self.model), bool(self.model.stop_training)),
        where=f"in a callback when epoch {epoch + 1} ended",
    )
    self.model.stop_training = any(stop for _, _, stop in ranks)
    _agree_on_learning_rate(self.model, group, ranks, f"after epoch {epoch + 1}")


def _agree_on_learning_rate(model: Any, group: Group, ranks: list[Any], when: str) -> None:
    """Let all ranks have the learning rate to which callbacks of some have changed it."""
    before, after = [rates[0] for rates in ranks], [rates[1] for rates in ranks]
    different = [rank for rank, rate in zip(group.ranks, after, strict=True) if rate != after[0]]
    if not different:
        return
    changed = {new for old, new in zip(before, after, strict=True) if new != old}
    if len(set(before)) == 1 and len(changed) == 1 and None not in changed:
        model.optimizer.learning_rate = changed.pop()
        return
    other = different[0]
    raise ConfigError(
        f"{group.who}: {when} the learning rate is {after[0]!r} on rank {group.root} and "
        f"{after[list(group.ranks).index(other)]!r} on rank {other}, and the ranks would drift "
        "apart. Give every rank the same callbacks, such as ReduceLROnPlateau."
    )


def _learning_rate(model: Any) -> float | None:
    try:
        return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    except (AttributeError, ValueError, TypeError):
        return None  # of a MultiOptimizer, or none


def _on_train_end(plain: Callable[..., Any], self: Any, logs: Any = None) -> None:
    state = vars(self).get(_STATE)
    if state is None:
        plain(self, logs)
        return
    error = _error_of(lambda: plain(self, logs))
    # What the root wrote is there when fit returns.
    share_error(state.group, "has trained", error, where="in a callback when training ended")
    if state.restoring:
        _take_over(self.model, state.group, state.restoring[0])
    self.callbacks = [c for c in self.callbacks if c is not state.average]
    del vars(self)[_STATE]
