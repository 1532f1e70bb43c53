"""Start training with the same weights on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_ring import runtime
from keras_ring.errors import ConfigError, MismatchError
from keras_ring.objects import allgather_object
from keras_ring.reducer import (
    accumulates,
    gradient_accumulators,
    is_distributed,
    local_variables,
    num_reductions,
)
from keras_ring.reduction import identity
from keras_ring.variables import broadcast_variables


class BroadcastInitialWeights(keras.callbacks.Callback):
    """Give every rank the weights and the optimizer state of one rank.

    Ranks draw different initial weights, or one rank alone has loaded a checkpoint. At the start of
    each `fit`, before the first batch, all weights of the model (those that are not trained, too)
    and all variables of its optimizer (moments, number of steps, learning rate, loss scale) become
    those of `root_rank`. A model that is built only by its first batch gets them right after that
    batch.

    The states of random seed generators are not touched: each rank goes on drawing its own dropout
    masks. Metrics, and gradients that a rank has accumulated for its next step, are not touched
    either.

    It may stand anywhere in the list of callbacks; callbacks that load weights when training
    begins, such as `BackupAndRestore`, are done by then.

    Args:
        root_rank: The rank that the others take over from. Defaults to 0.
        local_variables: Variables that each rank keeps as they are, with the optimizer's state for
            them. Those of `PartialDistributedOptimizer` are kept anyway. Defaults to none.

    Raises:
        ConfigError: `root_rank` is no rank; or the optimizer was distributed after the model was
            trained, so that Keras still runs a step that does not reduce.
        MismatchError: The ranks' models or optimizers have different variables.

    Collective: every rank has it in its list.
    Cost: one gather of the variables' shapes and one broadcast of all variables for each `fit`.

    Example:
        model.fit(x, y, callbacks=[keras_ring.callbacks.BroadcastInitialWeights()])
    """

    def __init__(self, root_rank: int = 0, *, local_variables: Sequence[Any] = ()) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.local_variables = list(local_variables)
        self._is_first_batch = False
        self._is_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Prepare for the first batch."""
        if not 0 <= self.root_rank < runtime.size():
            raise ConfigError(
                f"BroadcastInitialWeights: root_rank is {self.root_rank!r}; expected one of the "
                f"ranks 0 to {runtime.size() - 1}."
            )
        self._is_first_batch = True
        self._is_done = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Broadcast, if the model has its variables."""
        if not self._is_first_batch or self._is_done:
            return
        optimizer = self.model.optimizer
        if self.model.built and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._is_done = self._broadcast(is_last_chance=False)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Broadcast, if the first batch has created the variables."""
        if not self._is_first_batch:
            return
        self._is_first_batch = False
        self._check_reductions()
        if not self._is_done:
            self._is_done = self._broadcast(is_last_chance=True)

    def _broadcast(self, *, is_last_chance: bool) -> bool:
        """Broadcast if all ranks can; return whether they could."""
        optimizer = self.model.optimizer
        is_built = self.model.built and (optimizer is None or optimizer.built)
        variables = list(self.model.weights)
        if optimizer is not None:
            # What was accumulated is each rank's own part of the next step.
            left_out = {id(variable) for variable in gradient_accumulators(optimizer)}
            variables += [v for v in optimizer.variables if id(v) not in left_out]
        local = [*self.local_variables, *local_variables(optimizer)]
        variables = [v for v in variables if not _belongs_to(v, local)]
        shapes = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
        ranks = allgather_object((is_built, shapes))
        if not is_last_chance and not all(built for built, _ in ranks):
            return False
        for rank, (_, other) in enumerate(ranks):
            _check_equal(
                ranks[self.root_rank][1], other, self.root_rank, rank, [v.path for v in variables]
            )
        broadcast_variables(variables, self.root_rank)
        return True

    def _check_reductions(self) -> None:
        """A step has run: it must have reduced."""
        optimizer = self.model.optimizer
        if (
            is_distributed(optimizer)
            and not accumulates(optimizer)
            and self.model.trainable_variables
            and num_reductions(optimizer) == 0
        ):
            raise ConfigError(
                f"a training step has run, and the distributed optimizer {optimizer.name!r} "
                "reduced no gradient. Either it was distributed after the model had been trained "
                "and Keras kept the old step: call model.compile again. Or train_step does not "
                "call optimizer.apply: let it."
            )


def _belongs_to(variable: Any, local: list[Any]) -> bool:
    """Return whether `variable` is local, or an optimizer's state for one that is."""
    paths = [getattr(one, "path", one.name).replace("/", "_") + "_" for one in local]
    return variable.name.startswith(tuple(paths)) or any(
        identity(variable) == identity(one) for one in local
    )


def _check_equal(
    root: list[Any], other: list[Any], root_rank: int, rank: int, paths: list[str]
) -> None:
    """Raise, on every rank alike, for the first variable in which two ranks differ."""
    for i, (expected, got) in enumerate(zip(root, other, strict=False)):
        if expected != got:
            raise MismatchError(
                f"BroadcastInitialWeights: ranks disagree on variable {i} "
                f"({paths[i] if i < len(paths) else '-'}): rank {root_rank} has {expected[1]} of "
                f"shape {expected[0]}, rank {rank} has {got[1]} of shape {got[0]}. Build and "
                "compile the same model on every rank."
            )
    if len(root) != len(other):
        raise MismatchError(
            "BroadcastInitialWeights: ranks disagree on the number of variables of model and "
            f"optimizer: rank {root_rank} has {len(root)}, rank {rank} has {len(other)}. Build "
            "and compile the same model on every rank."
        )
