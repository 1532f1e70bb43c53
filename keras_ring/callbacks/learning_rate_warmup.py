"""Begin training with the learning rate of one rank."""

from __future__ import annotations

import sys
from typing import Any

from keras_ring import runtime
from keras_ring.callbacks.learning_rate_setter import LearningRateSetter
from keras_ring.errors import ConfigError


class LearningRateWarmup(LearningRateSetter):
    """Raise the learning rate linearly from `initial_lr / size()` to `initial_lr`.

    With N ranks the joint batch is N times as large, and the learning rate is often N times that of
    one process. In the first epochs such a rate can diverge: this begins with the rate of one
    process, and adds the same amount at each batch.

        learning_rate = initial_lr * (1 / size() + (1 - 1 / size()) * min(epochs_passed /
        warmup_epochs, 1))

    After the warm-up it leaves the learning rate alone, for other callbacks to change. An epoch is
    Keras's: `fit` with an `initial_epoch` past the warm-up changes nothing, `fit` that begins at
    epoch 0 again warms up again. Where Keras does not know how many batches an epoch has, the rate
    keeps its first value throughout the first epoch, with a warning, and then follows the line.
    With `steps_per_execution` it changes with each execution.

    Args:
        initial_lr: The learning rate after the warm-up, already multiplied with the number of ranks
            if it is to be.
        warmup_epochs: Length of the warm-up; may be a fraction. 0 for none. Defaults to 5.
        steps_per_epoch: Number of batches of an epoch. Defaults to what Keras knows.
        verbose: 1 to let rank 0 print a line when the warm-up ends. Defaults to 0.

    Raises:
        ConfigError: An argument is out of range; or, when training begins, the optimizer was built
            with a schedule.

    Collective: every rank has it in its list.
    Cost: one gather of a number for each `fit`.
    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017.

    Example:
        rate = 1e-3 * keras_ring.size()
        model.compile(keras_ring.DistributedOptimizer(keras.optimizers.Adam(rate)), loss="mse")
        model.fit(x, y, callbacks=[keras_ring.callbacks.LearningRateWarmup(rate, warmup_epochs=3)])
    """

    def __init__(
        self,
        initial_lr: float,
        *,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, steps_per_epoch)
        if not warmup_epochs >= 0:
            raise ConfigError(
                f"{self._who}: warmup_epochs is {warmup_epochs!r}; expected a number from 0 on."
            )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose
        self._is_warming = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate that the epoch begins with."""
        super().on_epoch_begin(epoch, logs)
        if epoch < self.warmup_epochs:
            self._is_warming = True
            self._follow(batch=0)
            self._warn_of_unknown_steps()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Set the rate of this batch."""
        if self._is_warming:
            self._follow(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the warm-up with its last epoch, even if no batch follows."""
        if self._is_warming and epoch + 1 >= self.warmup_epochs:
            self._finish()
        super().on_epoch_end(epoch, logs)

    def _follow(self, batch: int) -> None:
        progress = self._position(batch) / self.warmup_epochs
        if progress >= 1:
            self._finish()
            return
        start = 1 / runtime.size()
        self._set(self.initial_lr * (start + (1 - start) * progress))

    def _finish(self) -> None:
        self._is_warming = False
        self._set(self.initial_lr)
        if self.verbose and runtime.rank() == 0:
            sys.stdout.write(
                f"\nLearningRateWarmup: epoch {self._epoch + 1}: learning rate "
                f"{self.initial_lr:.6g}\n"
            )
