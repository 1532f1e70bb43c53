"""Callbacks of Keras that write files: where ranks name the same file, the root alone writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_ring.errors import ConfigError
from keras_ring.fitting import fits
from keras_ring.fitting.agreement import SCOPE, Group
from keras_ring.fitting.hooks import hook_method
from keras_ring.reducer import local_variables

# What they do besides writing, no other callback needs: where they may not write they are left out.
_LOGGERS = (keras.callbacks.TensorBoard, keras.callbacks.CSVLogger)
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
_PATHS = ("backup_dir", "filepath", "log_dir", "filename")
_IS_SILENT = "_keras_ring_is_silent"
_HAS_RESTORED = "_keras_ring_has_restored"


def patch() -> None:
    """Hook what they write, once."""
    checkpoint, backup = _SAVERS
    hook_method(checkpoint, "_should_save_model", _should_save_model)
    hook_method(backup, "_save_model", _unless_silent)
    hook_method(backup, "on_train_end", _unless_silent)
    hook_method(backup, "_load_model", _load_model)


def is_logger(callback: Any) -> bool:
    """Return whether a callback does nothing but write."""
    return type(callback) in _LOGGERS


def is_writer(callback: Any) -> bool:
    """Return whether a callback writes files."""
    return isinstance(callback, (*_LOGGERS, *_SAVERS))


def target_of(callback: Any) -> tuple[str, str]:
    """Return what a writer is and where it writes."""
    paths = (vars(callback).get(name) for name in _PATHS)
    path = next((p for p in paths if p is not None), "")
    return type(callback).__name__, str(Path(str(path)).absolute())


def has_restored(callback: Any) -> bool:
    """Return whether a callback has found a backup to go on from."""
    return bool(vars(callback).get(_HAS_RESTORED, False))


def decide(
    callbacks: Sequence[Any], group: Group, of_root: Sequence[tuple[str, str]], model: Any
) -> list[Any]:
    """Settle which callbacks write on this rank.

    Args:
        callbacks: Of this rank.
        group: The ranks that train together.
        of_root: What the root's callbacks write, and where.
        model: What they train.

    Returns:
        The callbacks that need not be there at all.

    Raises:
        ConfigError: Several ranks would save to one file, and their models are not the same.
    """
    mine = [c for c in callbacks if is_writer(c)]
    shared = [c for c in mine if target_of(c) in of_root]
    savers = [c for c in shared if isinstance(c, _SAVERS)]
    local = [v for optimizer in fits.optimizers_of(model) for v in local_variables(optimizer)]
    if local and savers:
        kind, path = target_of(savers[0])
        raise ConfigError(
            f"{group.who}: {kind} is given {path} on every rank, and the optimizer leaves "
            f"{local[0].path!r} to each rank. Give each rank a path of its own, for example with "
            "keras_ring.rank() in it."
        )
    if group.has_own_data:
        silent = [] if group.is_root else shared
    else:
        silent = [] if group.is_root else mine
    for callback in mine:
        vars(callback)[_IS_SILENT] = callback in silent
    return [c for c in silent if is_logger(c)]


def _is_silent(callback: Any) -> bool:
    # Outside of fit, in a loop of the user's own, it has not been settled.
    in_scope = fits.is_in_scope(getattr(callback, "_model", None)) and not SCOPE.is_root
    return bool(vars(callback).get(_IS_SILENT, in_scope))


def _should_save_model(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> bool:
    is_due = bool(plain(self, *args, **kwargs))
    return is_due and not _is_silent(self)


def _unless_silent(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    if not _is_silent(self):
        plain(self, *args, **kwargs)


def _load_model(plain: Callable[..., Any], self: Any) -> None:
    vars(self)[_HAS_RESTORED] = Path(str(self._weights_path)).exists()
    plain(self)
