"""What a distributed optimizer carries: how its gradients are reduced, and what was reduced so far.

It holds no hooks: optimizer_hooks.py binds those to an optimizer, keras_patches.py to Keras.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ring import gradients, joint_step
from keras_ring.errors import ConfigError
from keras_ring.reduction import Reduction

_ATTRIBUTE = "_keras_ring_reducer"
# By process set: its ranks alone use what reduces there, and need only agree among themselves.
_scopes: collections.defaultdict[Any, Iterator[int]] = collections.defaultdict(itertools.count)


class Reducer:
    """Reduces the gradients of one optimizer, under names that no other optimizer uses.

    Args:
        reduction: What the user has asked for.
        name: Tells this optimizer from others in the names of its requests. Defaults to its number
            among the optimizers that have reduced something: a rank may create more of them, as
            long as it does not use them.
        is_adopted: Whether a strategy made the optimizer distributed, and not the user: it reduces
            only in what that strategy runs.
    """

    def __init__(
        self,
        reduction: Reduction,
        name: str | None,
        *,
        is_adopted: bool = False,
    ) -> None:
        self.reduction = reduction
        self.name = name
        self.is_adopted = is_adopted
        # While True, what the optimizer is given was reduced already.
        self.is_reduced = False
        # While True, what it is given was multiplied with this rank's weight in the step already.
        self.is_weighed = False
        self.num_reductions = 0
        self.num_steps_without = 0
        # With accumulation: the variables of the step, and those of them whose gradients are to be
        # clipped.
        self.step_variables: Sequence[Any] = ()
        self.clip_variables: Sequence[Any] | None = None
        self._number: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Reducer:
        """Return one that shares no scope with this: both may be used in one function."""
        return Reducer(self.reduction, self.name, is_adopted=self.is_adopted)

    @property
    def scope(self) -> str:
        """The part of the requests' names that is this optimizer's."""
        if self.name is not None:
            return self.name
        if self._number is None:
            self._number = next(_scopes[self.reduction.process_set])
        return str(self._number)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be reduced here: a strategy's optimizer, used outside of it."""
        return self.is_adopted and joint_step.current() is None

    def weigh(self, values: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """Return `values` multiplied with this rank's weight in the step, unless they were."""
        replica = joint_step.current()
        if replica is None or self.is_weighed or self.reduction.op == "sum":
            return list(values)
        return replica.weigh_gradients(values)

    def reduce(
        self, values: Sequence[gradients.Gradient], variables: Sequence[Any]
    ) -> list[gradients.Gradient]:
        """Reduce `values`, the gradients of `variables`."""
        if self.is_idle:
            self.num_reductions += 1
            return list(values)
        replica = joint_step.current()
        strategy = tf.distribute.get_strategy()
        is_ours = getattr(strategy, "is_keras_ring", False)
        if strategy.num_replicas_in_sync > 1 and not is_ours:
            raise ConfigError(
                f"DistributedOptimizer is used under {type(strategy).__name__} with "
                f"{strategy.num_replicas_in_sync} replicas in one process; it expects one replica "
                "a rank. Build the model outside the strategy's scope and start one rank for each "
                "device, or use keras_ring.RingStrategy."
            )
        self.num_reductions += 1
        # tf.distribute's rule: losses were divided by the number of replicas, gradients add up.
        reduction = self.reduction
        if replica is not None and replica.is_sum:
            reduction = dataclasses.replace(reduction, op="sum", predivide_factor=1.0)
        return gradients.reduce_gradients(values, variables, reduction, scope=self.scope)

    def reduce_accumulated(self, values: Sequence[gradients.Gradient]) -> list[gradients.Gradient]:
        """Reduce `values`, those of `clip_variables`, under their names in the whole step."""
        variables = self.clip_variables or ()
        position = {id(variable): i for i, variable in enumerate(self.step_variables)}
        places = [position[id(variable)] for variable in variables]
        step_values: list[gradients.Gradient] = [None] * len(self.step_variables)
        for place, value in zip(places, values, strict=True):
            step_values[place] = value
        reduced = self.reduce(step_values, self.step_variables)
        return [reduced[place] for place in places]

    def agree(self, flag: tf.Tensor) -> tf.Tensor:
        """Return whether `flag` holds on every rank."""
        if self.is_idle:
            return flag
        return gradients.agree(flag, scope=self.scope, process_set=self.reduction.process_set)

    def check_step(self, num_before: int, num_allowed: int) -> None:
        """Refuse to go on when as many steps as `num_allowed` were applied without a reduction."""
        if self.num_reductions > num_before:
            self.num_steps_without = 0
            return
        self.num_steps_without += 1
        if self.num_steps_without >= num_allowed:
            raise ConfigError(
                f"DistributedOptimizer applied {self.num_steps_without} steps and reduced no "
                f"gradient: Keras {keras.__version__}, or the optimizer's own code, does not call "
                "what keras_ring hooks for gradient_accumulation_steps. Build the optimizer "
                "without gradient_accumulation_steps, or report this with the versions."
            )


def attach(optimizer: Any, reducer: Reducer) -> None:
    """Make `optimizer` carry `reducer`, unseen by Keras's tracking of attributes."""
    vars(optimizer)[_ATTRIBUTE] = reducer


def reducer_of(optimizer: Any) -> Reducer | None:
    """Return what a distributed optimizer carries; None for any other object."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return reducer_of(optimizer.inner_optimizer)
    return (
        vars(optimizer).get(_ATTRIBUTE)
        if isinstance(optimizer, keras.optimizers.Optimizer)
        else None
    )


def is_distributed(optimizer: Any) -> bool:
    """Return whether `optimizer` reduces its gradients over all ranks."""
    return reducer_of(optimizer) is not None


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables: itself, or those inside a MultiOptimizer."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return leaves(optimizer.inner_optimizer)
    if is_multi(optimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def is_multi(optimizer: Any) -> bool:
    """Return whether `optimizer` hands its variables to optimizers of its own."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def num_reductions(optimizer: Any) -> int:
    """Return how many reductions were built or run for `optimizer` and those inside it."""
    reducers = [reducer_of(optimizer), *map(reducer_of, leaves(optimizer))]
    return sum(reducer.num_reductions for reducer in reducers if reducer is not None)


def accumulates(optimizer: Any) -> bool:
    """Return whether an optimizer in `optimizer` joins several batches to one step."""
    return any(getattr(leaf, "gradient_accumulation_steps", None) for leaf in leaves(optimizer))


def gradient_accumulators(optimizer: Any) -> list[Any]:
    """Return the variables in which each rank gathers its own gradients until they are reduced."""
    return [
        variable
        for leaf in leaves(optimizer)
        for variable in getattr(leaf, "_accumulated_gradients", ())
        if variable is not None
    ]


def local_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer leaves to this rank, moving statistics included."""
    found: dict[int, Any] = {}
    for reducer in [reducer_of(optimizer), *map(reducer_of, leaves(optimizer))]:
        if reducer is not None:
            reduction = reducer.reduction
            of_layers = [v for layer in reduction.local_layers for v in layer.variables]
            found |= {id(v): v for v in (*of_layers, *reduction.local_variables)}
    return list(found.values())


def leave_to_rank(optimizer: Any, variable: Any) -> None:
    """Reduce the gradients of `variable` no more: it is this rank's alone."""
    for reducer in [reducer_of(optimizer), *map(reducer_of, leaves(optimizer))]:
        if reducer is not None:
            variables = (*reducer.reduction.local_variables, variable)
            reducer.reduction = dataclasses.replace(reducer.reduction, local_variables=variables)


def weigh_loss(optimizer: Any, loss: Any) -> Any:
    """Return the loss multiplied with this rank's weight in a strategy's step."""
    replica, reducer = joint_step.current(), reducer_of(optimizer)
    if replica is None or reducer is None or reducer.reduction.op == "sum":
        return loss
    return replica.weigh_loss(loss)


@contextlib.contextmanager
def already_reduced(optimizer: Any, *, is_only_weighed: bool = False) -> Iterator[None]:
    """Within it, `optimizer` takes the gradients that it is given as reduced, or as weighed."""
    reducers = [reducer for reducer in map(reducer_of, leaves(optimizer)) if reducer is not None]
    for reducer in reducers:
        reducer.is_reduced, reducer.is_weighed = not is_only_weighed, True
    try:
        yield
    finally:
        for reducer in reducers:
            reducer.is_reduced = reducer.is_weighed = False
