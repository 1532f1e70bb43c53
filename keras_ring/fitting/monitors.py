"""Callbacks that watch a metric: where ranks measure their own data, they are given the mean.

They decide alike on all ranks then, and as they would in one process. What they decide on one rank
alone, callbacks.py takes to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_ring.fitting import fits
from keras_ring.fitting.agreement import Group, gather
from keras_ring.fitting.hooks import hook_method

_MONITORS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
)


def patch() -> None:
    """Hook what they do at an epoch's end, once."""
    for cls in _MONITORS:
        hook_method(cls, "on_epoch_end", _on_epoch_end)


def is_monitor(callback: Any) -> bool:
    """Return whether a callback is given the means of the ranks' metrics."""
    return isinstance(callback, _MONITORS)


class Average(keras.callbacks.Callback):
    """Note an epoch's logs and their means over those ranks that have them, for the monitors.

    Args:
        fit: Where they are noted.
        group: Whose ranks.

    Collective: every rank of the group has it in its list.
    """

    def __init__(self, fit: fits.Fit, group: Group) -> None:
        super().__init__()
        self._fit = fit
        self._group = group

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Exchange what the callbacks before this one have left in the logs."""
        own = {name: float(value) for name, value in (logs or {}).items() if is_number(value)}
        ranks = gather(self._group, "has trained an epoch", own)
        values: dict[str, list[float]] = {}
        for logs_of_rank in ranks:
            for name, value in logs_of_rank.items():
                values.setdefault(name, []).append(value)
        self._fit.own_logs = own
        # Added up in rank order on every rank, so the bits are equal.
        self._fit.mean_logs = {name: sum(v) / len(v) for name, v in values.items()}


def is_number(value: Any) -> bool:
    """Return whether `value` is one real number, be it Python's, NumPy's or a tensor."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return array.ndim == 0 and array.dtype.kind in "iuf"


def _on_epoch_end(plain: Callable[..., Any], self: Any, epoch: int, logs: Any = None) -> None:
    fit = fits.of(getattr(self, "_model", None))
    if fit is None or not fit.mean_logs:
        plain(self, epoch, logs)
        return
    own = {} if logs is None else logs
    seen = dict(own)
    for name, mean in fit.mean_logs.items():
        # What a callback has put there since stays.
        if name not in own or float(own[name]) == fit.own_logs.get(name):
            seen[name] = mean
    plain(self, epoch, seen)
    if logs is not None:
        logs.update({name: value for name, value in seen.items() if name not in fit.mean_logs})
