"""Write what a training needs to go on from, and go on from it, on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from keras_ring import fitting, runtime
from keras_ring.callbacks import checkpoint_file, training_state
from keras_ring.callbacks.checkpoint_file import Array, Content
from keras_ring.errors import ConfigError
from keras_ring.fitting import fits
from keras_ring.fitting.agreement import Group, check_equal, gather, share_error
from keras_ring.fitting.monitors import is_number
from keras_ring.reducer import local_variables

_PROGRAM = "Every rank must have keras_ring.callbacks.Checkpoint in its list, and train together."


class Checkpoint(keras.callbacks.Callback):
    """Write a file from which the same script goes on, on as many ranks as it is started with.

    Rank 0 alone writes: weights, the optimizer's variables (moments, number of steps, learning
    rate, loss scale, accumulated gradients), epoch and batch, the history, and the state of random
    numbers (Keras's seed generators; Python's and NumPy's global ones). The file is replaced in one
    step: a job that is killed while it writes leaves the old one, whole.

    When `fit` begins and there is a file, all ranks go on from it; only rank 0 needs to see it.
    `epochs` counts from the beginning of the training, and `History` holds all of it. The data is
    brought to where it was: an `epoch` attribute is set if the data has one; otherwise batches of
    the epoch that are done are skipped, and shuffles with a fixed seed drawn as often as before.
    With `steps_per_epoch` the batches of all epochs before are read for that.

    On another number of ranks training goes on along the same curve if the joint batch stays the
    same: in a RingStrategy's scope of itself; with `DistributedOptimizer`, if the batch size of
    each rank times the number of ranks is what it was.

    A training that `stop_training` has cut short goes on at the next batch. Other callbacks begin
    anew, and so do the masks of a rank that was not there before.

    Args:
        path: The file. A path with the suffix ".partial" beside it is used while writing. Only
            rank 0's counts.
        every: "epoch", or a number of batches. What has ended training is written anyway. Defaults
            to "epoch".

    Raises:
        ConfigError: An argument is out of range. When training begins, on every rank: the model is
            not built; an optimizer leaves layers to each rank; the file is damaged, or of another
            model, or in the midst of an epoch that has another number of batches now. When the
            file cannot be written.

    Collective: every rank has it in its list.
    Cost: the ranks wait while rank 0 writes; two gathers of a few KiB for each file.

    Example:
        model.fit(x, y, epochs=90, callbacks=[keras_ring.callbacks.Checkpoint("run/state.npz")])
    """

    def __init__(self, path: str | os.PathLike[str], every: Literal["epoch"] | int = "epoch"):
        super().__init__()
        is_number_of_batches = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if every != "epoch" and not is_number_of_batches:
            raise ConfigError(
                f"Checkpoint: every is {every!r}; expected 'epoch' or a number of batches above 0."
            )
        self.path = Path(path)
        self.every = every
        self._group: Group | None = None
        self._fit: Any = None
        self._epoch = 0
        self._first_epoch: int | None = None
        self._num_done = 0
        self._num_since = 0
        self._is_due = False
        self._has_set_epoch = False
        # History before this epoch: what is kept in the midst of it.
        self._history: dict[str, Any] = {"epoch": [], "history": {}}
        # Of the epoch that is gone on with, and of one that was cut short.
        self._metrics_before: list[Array] | None = None
        self._logs_before: dict[str, float] = {}
        self._metrics_of_cut: list[Array] | None = None
        self._logs: dict[str, float] = {}
        fitting.patch()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Go on from the file, if there is one."""
        self._fit = fits.of(self.model)
        if self._fit is None:
            raise ConfigError(
                "Checkpoint: it is used outside of a fit that keras_ring follows. Call "
                "keras_ring.init() when the script begins, and give Checkpoint to model.fit."
            )
        self._group = self._fit.group
        if self._group is None and runtime.is_initialized() and runtime.size() > 1:
            self._group = Group("Checkpoint", _PROGRAM, has_own_data=True)
        self._first_epoch = None
        self._num_done = self._num_since = 0
        self._is_due = False
        self._history = {"epoch": [], "history": {}}
        self._metrics_before, self._logs_before = None, {}
        self._metrics_of_cut, self._logs = None, {}
        error = None
        content: Content | None = None
        try:
            self._check_model()
            content = checkpoint_file.read(self.path) if self._is_root else None
        except ConfigError as raised:
            error = raised
        state = self._agree(None if content is None else content.state, error)
        self._fit.after_epoch.append(self._after_epoch)
        if state is not None:
            self._restore(state, content)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Note where the epoch begins."""
        self._forget_initial_epoch()
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._list_of_epochs()[:] = self._history["epoch"]
        self._epoch = epoch
        self._num_done = self._fit.num_to_skip
        self._metrics_of_cut = None
        self._history = self._copy_of_history()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Write, if it was time after the batch before: what callbacks did to that is in it."""
        if self._is_due:
            metrics = training_state.metric_values(self.model)
            self._write(self._epoch, batch, self._history, metrics)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Count. With `steps_per_execution`, `batch` is the last one of several."""
        if self._metrics_before is not None:
            training_state.add_to_metrics(self.model, self._metrics_before)
            self._metrics_before = None
        self._num_since += batch + 1 - self._num_done
        self._num_done = batch + 1
        self._logs = {k: float(v) for k, v in (logs or {}).items() if is_number(v)}
        self._is_due = self.every != "epoch" and self._num_since >= int(self.every)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Keep the metrics of an epoch that was cut short: the validation will reset them."""
        if self.model.stop_training:
            self._metrics_of_cut = training_state.metric_values(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Show the metrics of an epoch of which there was no batch left to train."""
        if self._metrics_before is not None:
            self._metrics_before = None
            for name, value in self._logs_before.items() if logs is not None else ():
                logs.setdefault(name, value)  # type: ignore[union-attr]

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Leave the model as one that was trained without it."""
        self._forget_initial_epoch()
        if self._first_epoch is None:
            self._list_of_epochs()[:] = self._history["epoch"]

    @property
    def _is_root(self) -> bool:
        return self._group is None or self._group.is_root

    def _check_model(self) -> None:
        if not self.model.built:
            raise ConfigError(
                f"Checkpoint: the model {self.model.name!r} is not built when training begins, so "
                "its state could not be given back before the first batch. Begin it with "
                "keras.Input, or call model.build."
            )
        local = [v for o in fits.optimizers_of(self.model) for v in local_variables(o)]
        if local:
            raise ConfigError(
                f"Checkpoint: the optimizer leaves {local[0].path!r} to each rank, and rank 0 "
                f"alone writes {self.path}. Use keras.callbacks.BackupAndRestore with a path for "
                "each rank, for example with keras_ring.rank() in it."
            )
        for callback in self._fit.callback_list.callbacks:
            if isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch:
                raise ConfigError(
                    "Checkpoint: SwapEMAWeights(swap_on_epoch=True) puts averages in the place of "
                    "the weights when the file is written. Use SwapEMAWeights()."
                )
        training_state.build_optimizers(self.model)

    def _agree(
        self, state: dict[str, Any] | None, error: ConfigError | None
    ) -> dict[str, Any] | None:
        """Return what the root has found; an error on all ranks if there is one on any."""
        group = self._group
        if group is not None and group.size > 1:
            what = "begins to train with Checkpoint"
            ranks = gather(group, what, (self.every, state, None if error is None else str(error)))
            check_equal(
                group,
                what,
                [{"every": every} for every, _, _ in ranks],
                advice="Give Checkpoint the same arguments on every rank.",
            )
            messages = [message for _, _, message in ranks if message is not None]
            if error is None and messages:
                error = ConfigError(messages[0])
            state = ranks[0][1]
        if error is not None:
            raise error
        return state

    def _after_epoch(self, epoch: int) -> None:
        """Write, if it is time, when all callbacks have ended the epoch."""
        is_stopping = bool(self.model.stop_training)
        is_last = is_stopping or epoch + 1 >= int((self.params or {}).get("epochs") or 0)
        if self.every != "epoch" and not self._is_due and not is_last:
            return
        num_batches = self._fit.num_batches
        is_all = self._fit.has_no_more or (
            num_batches is not None and self._num_done >= num_batches
        )
        if is_stopping and not is_all:
            metrics = self._metrics_of_cut
            if metrics is None:
                metrics = training_state.metric_values(self.model)
            self._write(epoch, self._num_done, self._history, metrics)
        else:
            self._write(epoch + 1, 0, self._copy_of_history(), [])

    def _write(self, epoch: int, batch: int, history: dict[str, Any], metrics: list[Array]) -> None:
        self._is_due, self._num_since = False, 0
        group, model = self._group, self.model
        values = training_state.common_values(model, group)
        own = {
            "random": training_state.random_state(model),
            "history": history,
            "metrics": [[m.tolist(), m.dtype.name] for m in metrics],
        }
        ranks = [own] if group is None else gather(group, "writes a checkpoint", own)
        error = None
        if self._is_root:
            state = {
                "epoch": epoch,
                "batch": batch,
                "first_epoch": self._first_epoch or 0,
                "num_batches": self._fit.num_batches,
                "variables": training_state.specs_of(training_state.common_variables(model)),
                "is_joint": group is not None and not group.has_own_data,
                "logs": self._logs,
                "ranks": ranks,
            }
            arrays = {f"variable{i}": value for i, value in enumerate(values)}
            try:
                checkpoint_file.write(self.path, Content(state, arrays))
            except OSError as raised:
                error = (
                    f"Checkpoint: rank {0 if group is None else group.root} cannot write "
                    f"{self.path} ({type(raised).__name__}: {raised}). Make room, or give "
                    "Checkpoint a path that can be written."
                )
        if group is not None:
            error = gather(group, "has written a checkpoint", error)[0]
        if error is not None:
            raise ConfigError(error)

    def _restore(self, state: dict[str, Any], content: Content | None) -> None:
        model, group, fit = self.model, self._group, self._fit
        error = None
        try:
            variables = training_state.common_variables(model)
            training_state.check_fits(self.path, state["variables"], variables)
            self._check_place(state)
        except ConfigError as raised:
            error = raised
        if group is not None and group.size > 1:
            share_error(group, "takes a checkpoint", error, where=f"with {self.path}")
        if error is not None:
            raise error
        values = None
        if content is not None:
            values = [content.arrays[f"variable{i}"] for i in range(len(variables))]
        training_state.give_common(model, group, values)

        own = self._own_of(state)
        if own is not None:
            training_state.give_seeds(model, own["random"])
        self._history = (own or state["ranks"][0])["history"]
        self._show_history()
        self._metrics_before = self._metrics_of(state) if state["batch"] else None
        self._logs_before = state["logs"]
        epoch = state["epoch"]
        model._initial_epoch = epoch
        self._has_set_epoch = True
        fit.num_to_skip = state["batch"]
        if not _set_epoch(fit.data, epoch):
            fit.num_epochs_to_replay = epoch - state["first_epoch"]
        if own is not None:
            fit.when_rewound = lambda: training_state.give_random_state(own["random"])

    def _check_place(self, state: dict[str, Any]) -> None:
        batch, expected, num_batches = state["batch"], state["num_batches"], self._fit.num_batches
        if not batch:
            return
        if expected is not None and num_batches is not None and expected != num_batches:
            raise ConfigError(
                f"Checkpoint: {self.path} is after batch {batch} of an epoch of {expected}, and an "
                f"epoch has {num_batches} now. Give fit the same data and the same joint batch, "
                "which is the batch size of each rank times the number of ranks with a "
                "distributed optimizer; or write files with every='epoch'."
            )
        at_once = int(self._fit.iterator.steps_per_execution)
        if batch % at_once:
            raise ConfigError(
                f"Checkpoint: {self.path} is after batch {batch} of an epoch, and compile was "
                f"given steps_per_execution={at_once}; expected a divisor of {batch}, such as 1."
            )

    def _own_of(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return what the file has of this rank; None if it was not there."""
        ranks: list[dict[str, Any]] = state["ranks"]
        group = self._group
        if group is None:
            return ranks[0]
        place = list(group.ranks).index(runtime.rank())
        if group.has_own_data:
            return ranks[place] if place < len(ranks) else None
        # In a scope all ranks draw the same shuffles, and each its own masks.
        seeds = ranks[min(place, len(ranks) - 1)]["random"]["seeds"] if place < len(ranks) else []
        return {**ranks[0], "random": {**ranks[0]["random"], "seeds": seeds}}

    def _metrics_of(self, state: dict[str, Any]) -> list[Array]:
        """Return the part of this rank in what metrics had added up."""
        group = self._group
        ranks = [
            [np.asarray(value, dtype) for value, dtype in own["metrics"]] for own in state["ranks"]
        ]
        size = 1 if group is None else group.size
        if not state["is_joint"] and len(ranks) == size and (group is None or group.has_own_data):
            place = 0 if group is None else list(group.ranks).index(runtime.rank())
            return ranks[place]
        totals = ranks[0]
        if not state["is_joint"]:
            totals = [np.sum(each, axis=0) for each in zip(*ranks, strict=True)]
        if group is None or not group.has_own_data:
            return [np.asarray(total) for total in totals]
        return [np.asarray(total / size).astype(total.dtype) for total in totals]

    def _list_of_epochs(self) -> list[int]:
        epochs: list[int] = self.model.history.epoch
        return epochs

    def _copy_of_history(self) -> dict[str, Any]:
        history = self.model.history
        values = {
            name: [float(v) if is_number(v) else str(v) for v in each]
            for name, each in history.history.items()
        }
        return {"epoch": list(history.epoch), "history": values}

    def _show_history(self) -> None:
        # History itself begins its list of epochs anew, after this.
        self.model.history.history = {k: list(v) for k, v in self._history["history"].items()}

    def _forget_initial_epoch(self) -> None:
        """Keras would begin every later fit there, one without this callback too."""
        if self._has_set_epoch:
            self.model._initial_epoch = None
            self._has_set_epoch = False


def _set_epoch(data: Any, epoch: int) -> bool:
    """Tell the data which epoch comes, if it can be told."""
    if not hasattr(data, "epoch"):
        return False
    try:
        data.epoch = epoch
    except AttributeError:
        return False
    return True
