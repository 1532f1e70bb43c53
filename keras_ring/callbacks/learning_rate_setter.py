"""What callbacks that set the learning rate have in common."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from keras_ring import runtime
from keras_ring.errors import ConfigError
from keras_ring.objects import allgather_object


class LearningRateSetter(keras.callbacks.Callback):
    """Set the optimizer's learning rate in the course of an epoch. Not meant to be used directly.

    It knows how far an epoch has come. All ranks use the same number of steps for an epoch, the
    smallest that one of them has, since ranks with different learning rates would drift apart.

    Args:
        initial_lr: The learning rate that the schedule is relative to.
        steps_per_epoch: Number of batches of an epoch. Defaults to what Keras knows, or to what was
            counted in the first epoch.
    """

    def __init__(self, initial_lr: float, steps_per_epoch: int | None) -> None:
        super().__init__()
        if not initial_lr > 0:
            raise ConfigError(
                f"{self._who}: initial_lr is {initial_lr!r}; expected a number above 0."
            )
        if steps_per_epoch is not None and not steps_per_epoch > 0:
            raise ConfigError(
                f"{self._who}: steps_per_epoch is {steps_per_epoch!r}; expected a number above 0 "
                "or None."
            )
        self.initial_lr = float(initial_lr)
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._num_steps: int | None = None
        self._num_counted = 0

    @property
    def _who(self) -> str:
        return type(self).__name__

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Check that the learning rate can be set, and agree on the length of an epoch."""
        self._check_settable()
        self._num_steps = _smallest(self.steps_per_epoch or (self.params or {}).get("steps"))
        self._num_counted = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Take the count of the epoch before for the length of an epoch that is not known."""
        if self._num_steps is None and self._num_counted:
            self._num_steps = _smallest(self._num_counted)
        self._num_counted = 0
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Count. With `steps_per_execution`, `batch` is the last one of several."""
        self._num_counted = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Log the learning rate, under the name that Keras uses."""
        if logs is not None:
            logs["learning_rate"] = self._get()

    def _position(self, batch: int) -> float:
        """Return how many epochs have passed, as far as the length of an epoch is known."""
        if self._num_steps is None:
            return float(self._epoch)
        return self._epoch + min(batch / self._num_steps, 1.0)

    def _warn_of_unknown_steps(self) -> None:
        """Say that the learning rate moves once an epoch only."""
        if self._num_steps is None and runtime.rank() == 0:
            warnings.warn(
                f"{self._who}: how many batches an epoch has is not known before the first one "
                f"ends, so the learning rate stays at {self._get():.6g} throughout it. Pass "
                "steps_per_epoch to change it with each batch.",
                stacklevel=2,
            )

    def _get(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, learning_rate: float) -> None:
        self.model.optimizer.learning_rate = learning_rate

    def _check_settable(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None:
            raise ConfigError(f"{self._who}: the model has no optimizer. Call model.compile first.")
        try:
            learning_rate = optimizer.learning_rate
        except AttributeError:
            raise ConfigError(
                f"{self._who}: {type(optimizer).__name__} has no learning rate of its own. Build "
                "the optimizers in it with schedules, for example "
                "keras.optimizers.schedules.CosineDecay(warmup_steps=...)."
            ) from None
        if not hasattr(learning_rate, "assign"):
            raise ConfigError(
                f"{self._who}: the optimizer {optimizer.name!r} was built with a schedule or a "
                "function as its learning_rate, which no callback can set; expected a number. "
                f"Either build it with a number, such as learning_rate={self.initial_lr!r}, or "
                "leave the callback out and let the schedule warm up, for example "
                "keras.optimizers.schedules.CosineDecay(warmup_steps=..., warmup_target=...)."
            )


def _smallest(num_steps: int | None) -> int | None:
    """The smallest number of steps of all ranks; None if a rank does not know its own."""
    ranks = allgather_object(num_steps)
    return None if None in ranks else min(ranks)
