"""Horovod's callbacks for Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_ring import callbacks

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(callbacks.BroadcastInitialWeights):
    """See `keras_ring.callbacks.BroadcastInitialWeights`."""

    def __init__(
        self,
        root_rank: int,
        device: str = "",  # noqa: ARG002
        local_variables: Sequence[Any] | None = None,
    ) -> None:
        """Note the root."""
        super().__init__(root_rank, local_variables=local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Leave a variable to each rank."""
        self.local_variables.append(var)


class MetricAverageCallback(callbacks.MetricAverage):
    """See `keras_ring.callbacks.MetricAverage`."""

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        """Take a device, which means nothing here."""
        super().__init__()


class LearningRateScheduleCallback(callbacks.LearningRateSchedule):
    """See `keras_ring.callbacks.LearningRateSchedule`.

    `momentum_correction` is taken and does nothing: Keras 3 fixes an optimizer's momentum when it
    traces the step.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,  # noqa: ARG002
        steps_per_epoch: int | None = None,
    ) -> None:
        """Take Horovod's arguments by position, too."""
        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=start_epoch,
            end_epoch=end_epoch,
            staircase=staircase,
            steps_per_epoch=steps_per_epoch,
        )


class LearningRateWarmupCallback(callbacks.LearningRateWarmup):
    """See `keras_ring.callbacks.LearningRateWarmup`, and above for `momentum_correction`."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,  # noqa: ARG002
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Take Horovod's arguments by position, too."""
        super().__init__(
            initial_lr,
            warmup_epochs=warmup_epochs,
            steps_per_epoch=steps_per_epoch,
            verbose=verbose,
        )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` that keeps the best model alone; set `filepath` before `fit`."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Leave the path open."""
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to begin without a path."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath before fit.")
        super().on_train_begin(logs)
