"""Set the learning rate by epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_ring.callbacks.learning_rate_setter import LearningRateSetter
from keras_ring.errors import ConfigError


class LearningRateSchedule(LearningRateSetter):
    """Set the learning rate to `initial_lr` times a multiplier, in some of the epochs.

    Several of them, and a `LearningRateWarmup`, can share a training: each acts in the epochs from
    its `start_epoch` up to, but not including, its `end_epoch`, and leaves the learning rate alone
    in the others.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A function of the epoch, or a number. A number means `multiplier ** (epoch -
            start_epoch)`: the rate falls, or grows, by that factor each epoch.
        start_epoch: The first epoch in which it acts. Defaults to 0.
        end_epoch: The first epoch in which it does not act any more. Defaults to None, which means
            never.
        staircase: True to set the rate once an epoch; False to set it at each batch, with epochs as
            a fraction. Defaults to True.
        steps_per_epoch: Number of batches of an epoch, for `staircase=False`. Defaults to what
            Keras knows; if it knows none, the first epoch keeps its first rate, with a warning.

    Raises:
        ConfigError: An argument is out of range; or, when training begins, the optimizer was built
            with a schedule.

    Collective: every rank has it in its list.
    Cost: one gather of a number for each `fit`.

    Example:
        step = keras_ring.callbacks.LearningRateSchedule(0.1, lambda epoch: 0.1 ** (epoch // 30),
        start_epoch=5)
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        *,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(initial_lr, steps_per_epoch)
        if end_epoch is not None and end_epoch < start_epoch:
            raise ConfigError(
                f"{self._who}: end_epoch is {end_epoch!r} and start_epoch is {start_epoch!r}; "
                "expected an end_epoch from start_epoch on, or None."
            )
        if not callable(multiplier) and not isinstance(multiplier, (int, float)):
            raise ConfigError(
                f"{self._who}: multiplier is {multiplier!r}; expected a number or a function of "
                "the epoch."
            )
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate that the epoch begins with."""
        super().on_epoch_begin(epoch, logs)
        if self._acts():
            self._set(self._rate(epoch))
            if not self.staircase:
                self._warn_of_unknown_steps()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Set the rate of this batch."""
        if not self.staircase and self._acts():
            self._set(self._rate(self._position(batch)))

    def _acts(self) -> bool:
        return self.start_epoch <= self._epoch and (
            self.end_epoch is None or self._epoch < self.end_epoch
        )

    def _rate(self, epoch: float) -> float:
        if callable(self.multiplier):
            return self.initial_lr * float(self.multiplier(epoch))
        return self.initial_lr * float(self.multiplier ** (epoch - self.start_epoch))
