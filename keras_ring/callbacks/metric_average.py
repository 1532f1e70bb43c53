"""Average the logs of an epoch over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_ring import runtime
from keras_ring.fitting.monitors import is_number
from keras_ring.objects import allgather_object


class MetricAverage(keras.callbacks.Callback):
    """Replace the metrics in an epoch's logs by their mean over all ranks.

    Each rank measures loss and metrics on its own shard. At the end of each epoch every number in
    the logs, those of the validation too, becomes the mean over the ranks, the same on every rank.
    Callbacks that come later in the list, and `History`, see the mean. With a distributed optimizer
    `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` are given means anyway, so that they
    decide alike on every rank; put it before callbacks of your own that decide something.

    The mean is a plain one. It is the value for all shards together if the shards are equally large
    and the metric is itself a mean over samples, as loss and accuracy are. For AUC, precision or a
    masked metric it is an approximation.

    An entry that some ranks do not have, such as `val_loss` where one rank validates alone, stays
    as it is, and rank 0 warns once. `EarlyStopping` and the like see the mean over the ranks that
    have it.

    In a call of `evaluate` of its own the logs of `on_test_end` are averaged likewise; what
    `evaluate` returns is the rank's own.

    Collective: every rank has it in its list.
    Cost: one gather of the logs at the end of each epoch.

    Example:
        model.fit(x, y, validation_data=(x_val, y_val),
                  callbacks=[keras_ring.callbacks.MetricAverage(),
                  keras.callbacks.EarlyStopping(patience=3)])
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_in_fit = False
        self._has_warned = False
        self._epoch_means: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Leave validations within `fit` to the end of the epoch: a rank may validate alone."""
        self._is_in_fit = True
        self._epoch_means = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average the logs in place."""
        self._epoch_means = self._average(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Show the last epoch's means here too: Keras hands each hook a copy of its own."""
        self._is_in_fit = False
        if logs is not None:
            logs.update(self._epoch_means)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average the logs of an evaluation in place."""
        if not self._is_in_fit:
            self._average(logs)

    def _average(self, logs: dict[str, Any] | None) -> dict[str, float]:
        """Average `logs` in place and return the means."""
        own = {name: float(value) for name, value in (logs or {}).items() if is_number(value)}
        # The entries travel with their names: ranks whose entries differ cannot wait for one
        # another.
        ranks = allgather_object(own)
        common = set.intersection(*(set(values) for values in ranks))
        self._warn_of_others(ranks, common)
        # Added up in rank order on every rank, so the bits are equal.
        means = {
            name: sum(values[name] for values in ranks) / len(ranks) for name in sorted(common)
        }
        if logs is not None:
            logs.update(means)
        return means

    def _warn_of_others(self, ranks: list[dict[str, float]], common: set[str]) -> None:
        others = sorted({name for values in ranks for name in values} - common)
        if not others or self._has_warned:
            return
        self._has_warned = True
        if runtime.rank() == 0:
            lacking = "; ".join(
                f"{name!r}: ranks {[r for r, v in enumerate(ranks) if name not in v]}"
                for name in others
            )
            warnings.warn(
                "MetricAverage: not every rank has the same metrics, and those that some lack are "
                f"not averaged (lacking {lacking}). Give every rank the same metrics and "
                "validation data.",
                stacklevel=2,
            )
