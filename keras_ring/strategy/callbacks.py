"""Callbacks of a model in a scope: they decide alike on all ranks, and write on rank 0.

Logs are the same on all ranks, so a callback that all ranks have decides alike by itself. What a
callback on one rank alone decides, all ranks follow: one that stopped would leave the others
waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ring import collectives, runtime
from keras_ring.errors import ConfigError
from keras_ring.strategy.agreement import agree, gather
from keras_ring.strategy.keras_fit import _hooked, is_ours
from keras_ring.variables import broadcast_variables

_WRITERS = (keras.callbacks.TensorBoard, keras.callbacks.CSVLogger)
# They stop nothing in the course of an epoch.
_QUIET = (
    keras.callbacks.ProgbarLogger,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
)


def patch() -> None:
    """Hook Keras's list of callbacks and those of its callbacks that write, once."""
    cls = keras.callbacks.CallbackList
    if hasattr(cls.on_train_begin, "_keras_ring_patched"):
        return
    cls.set_model = _hooked(cls.set_model, _set_model)
    cls.on_train_begin = _hooked(cls.on_train_begin, _on_train_begin)
    cls.on_train_batch_end = _hooked(cls.on_train_batch_end, _on_train_batch_end)
    cls.on_epoch_end = _hooked(cls.on_epoch_end, _on_epoch_end)
    cls.on_train_end = _hooked(cls.on_train_end, _on_train_end)
    checkpoint = keras.callbacks.ModelCheckpoint
    checkpoint._should_save_model = _hooked(checkpoint._should_save_model, _should_save_model)
    backup = keras.callbacks.BackupAndRestore
    backup._save_model = _hooked(backup._save_model, _on_rank_0)
    backup.on_train_end = _hooked(backup.on_train_end, _on_rank_0)


def _is_joint(callback: Any) -> bool:
    return is_ours(getattr(callback.model, "_distribute_strategy", None))


def _set_model(plain: Callable[..., Any], self: Any, model: Any) -> None:
    if is_ours(getattr(model, "_distribute_strategy", None)) and runtime.rank() != 0:
        self.callbacks = [c for c in self.callbacks if type(c) not in _WRITERS]
    plain(self, model)


def _on_train_begin(plain: Callable[..., Any], self: Any, logs: Any = None) -> None:
    if not _is_joint(self):
        plain(self, logs)
        return
    ours = [c for c in self.callbacks if type(c).__module__.startswith("keras_ring.")]
    agree(
        "begins to train",
        {
            "epochs": (self.params or {}).get("epochs"),
            "callbacks of keras_ring": [type(c).__name__ for c in ours],
        },
        advice="Give fit the same arguments on every rank.",
    )
    watches = gather("watches what stops training", any(map(_may_stop_in_epoch, self.callbacks)))
    self.keras_ring_watches = any(watches)
    plain(self, logs)
    model = self.model
    epochs = gather("has begun to train", model._initial_epoch)
    if any(epoch != epochs[0] for epoch in epochs):
        # BackupAndRestore found a backup on some ranks only: rank 0 decides.
        model._initial_epoch = epochs[0]
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        optimizer_variables = [] if model.optimizer is None else model.optimizer.variables
        broadcast_variables([*model.variables, *optimizer_variables], name="strategy/restore")


def _may_stop_in_epoch(callback: Any) -> bool:
    if type(callback) in _QUIET:
        return False
    return any(
        hook in vars(callback)
        or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
        for hook in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    )


def _on_train_batch_end(plain: Callable[..., Any], self: Any, batch: int, logs: Any = None) -> None:
    plain(self, batch, logs)
    if getattr(self, "keras_ring_watches", False):
        flag = tf.constant(int(bool(self.model.stop_training)), tf.int32)
        stop = collectives.allreduce(flag, "max", name="strategy/stop#model.stop_training")
        self.model.stop_training = bool(stop.numpy())


def _on_epoch_end(plain: Callable[..., Any], self: Any, epoch: int, logs: Any = None) -> None:
    plain(self, epoch, logs)
    if not _is_joint(self):
        return
    own = (bool(self.model.stop_training), _learning_rate(self.model))
    ranks = gather("ends an epoch", own)
    self.model.stop_training = any(stop for stop, _ in ranks)
    for other, (_, rate) in enumerate(ranks):
        if rate != ranks[0][1]:
            raise ConfigError(
                f"RingStrategy: after epoch {epoch + 1} the learning rate is {ranks[0][1]!r} on "
                f"rank 0 and {rate!r} on rank {other}, and the ranks would drift apart. Give every "
                "rank the same callbacks, such as ReduceLROnPlateau."
            )


def _learning_rate(model: Any) -> float | None:
    try:
        return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    except (AttributeError, ValueError, TypeError):
        return None  # of a MultiOptimizer, or none


def _on_train_end(plain: Callable[..., Any], self: Any, logs: Any = None) -> None:
    plain(self, logs)
    if _is_joint(self):
        # What rank 0 wrote is there when fit returns.
        gather("has trained", None)


def _should_save_model(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> bool:
    is_due = bool(plain(self, *args, **kwargs))
    return is_due and not (_is_joint(self) and runtime.rank() != 0)


def _on_rank_0(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    if not (_is_joint(self) and runtime.rank() != 0):
        plain(self, *args, **kwargs)
