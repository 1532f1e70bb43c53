"""The hooks that make a Keras optimizer reduce gradients, bound to the optimizer object.

Not to a subclass or a wrapper around it: its class, config and state stay what they are, so what
`model.save` writes loads in plain Keras. What a gradient may be, gradients.py knows.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ring import fitting, joint_step
from keras_ring.errors import ConfigError, InternalError
from keras_ring.gradients import Gradient, is_overwritten
from keras_ring.keras_patches import patch_loss_scaling, patch_pickling
from keras_ring.reducer import (
    Reducer,
    accumulates,
    attach,
    is_multi,
    leaves,
    reducer_of,
    weigh_loss,
)
from keras_ring.reduction import Reduction

# Keras 3.0 clips each batch's gradients and then adds them up. What is clipped must have been
# reduced, so there each batch is reduced. Later versions clip the sum, within this method: one
# reduction for all batches of a step.
_CLIPS_ACCUMULATED = (
    "_clip_gradients" in keras.optimizers.Optimizer._backend_apply_gradients.__code__.co_names
    if hasattr(keras.optimizers.Optimizer, "_backend_apply_gradients")
    else False
)


def install(optimizer: Any, reducer: Reducer) -> None:
    """Make a Keras optimizer reduce gradients with `reducer`, once.

    Args:
        optimizer: A `keras.optimizers.Optimizer`.
        reducer: What it will carry.

    Raises:
        ConfigError: It was distributed in another way.
    """
    patch_loss_scaling(adopt)
    patch_pickling(_rebuild)
    fitting.patch()
    _distribute(optimizer, reducer)


def adopt(optimizer: Any) -> None:
    """Make an optimizer that a strategy uses reduce gradients within what that strategy runs.

    Does nothing for one that is distributed already, by the user or by a strategy.
    """
    patch_loss_scaling(adopt)
    patch_pickling(_rebuild)
    if reducer_of(optimizer) is None:
        _distribute(optimizer, Reducer(Reduction(), None, is_adopted=True))


def adopt_when_applied() -> None:
    """Make any optimizer that is applied within a strategy's `run` reduce gradients there.

    For loops of the user's own, whose optimizer the strategy does not know before.
    """
    patch_loss_scaling(adopt)
    owner = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "apply" in vars(cls))
    plain_apply = owner.apply
    if hasattr(plain_apply, "_keras_ring_patched"):
        return

    @functools.wraps(plain_apply)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if joint_step.current() is None or reducer_of(self) is not None:
            return plain_apply(self, grads, trainable_variables)
        adopt(self)
        return _reduce_and_apply(plain_apply, self, grads, trainable_variables)

    apply._keras_ring_patched = True  # type: ignore[attr-defined]
    owner.apply = apply


def _distribute(optimizer: Any, reducer: Reducer) -> None:
    """Bind the hooks to `optimizer` and to those inside it, once."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _distribute(optimizer.inner_optimizer, reducer)
        return
    present = reducer_of(optimizer)
    if present is not None and present.is_adopted and not reducer.is_adopted:
        # The user's word counts from here on, outside of the strategy too.
        attach(optimizer, reducer)
        if is_multi(optimizer):
            _distribute_leaves(optimizer)
        return
    if present is not None:
        has, wanted = present.reduction, reducer.reduction
        for field in dataclasses.fields(Reduction):
            theirs, ours = getattr(has, field.name), getattr(wanted, field.name)
            if field.compare and theirs != ours:
                raise ConfigError(
                    f"DistributedOptimizer: {optimizer.name!r} is distributed with "
                    f"{field.name}={theirs!r} already, and {field.name}={ours!r} was asked for. "
                    "Wrap a new optimizer."
                )
        return
    attach(optimizer, reducer)
    hooks = _MULTI_HOOKS if is_multi(optimizer) else _HOOKS
    for method, hook in hooks.items():
        # Past Keras's __setattr__, which is for state. Keras looks methods up on the object, so it
        # finds these.
        vars(optimizer)[method] = types.MethodType(hook, optimizer)
    if is_multi(optimizer):
        _distribute_leaves(optimizer)


def _distribute_leaves(multi: Any) -> None:
    """Bind the hooks to the optimizers inside a MultiOptimizer that it has so far."""
    reducer = _own_reducer(multi)
    for i, leaf in enumerate(leaves(multi)):
        name = None if reducer.name is None else f"{reducer.name}/{i}"
        leaf_reducer = Reducer(reducer.reduction, name, is_adopted=reducer.is_adopted)
        _distribute(leaf, leaf_reducer)


def _own_reducer(optimizer: Any) -> Reducer:
    reducer = reducer_of(optimizer)
    if reducer is None:
        raise InternalError(
            f"optimizer {optimizer.name!r} has keras_ring's hooks and no reducer. This is a bug "
            "in keras_ring; report it with the code that made the optimizer."
        )
    return reducer


def _rebuild(reducer: Reducer, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Make the copy of a pickled model or optimizer, and distribute it like the original."""
    copy = function(*arguments)
    # Variables and layers are those of the original.
    reduction = dataclasses.replace(
        reducer.reduction, groups=None, local_layers=(), local_variables=()
    )
    install(getattr(copy, "optimizer", copy), Reducer(reduction, reducer.name))
    return copy


# Each hook below calls the method of the object's class, so a subclass of the user's keeps its own.


def _apply(
    self: Any, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None
) -> Any:
    """Reduce, then take the step."""
    return _reduce_and_apply(type(self).apply, self, grads, trainable_variables)


def _reduce_and_apply(
    plain_apply: Callable[..., Any],
    self: Any,
    grads: Iterable[Gradient],
    trainable_variables: Iterable[Any] | None,
) -> Any:
    reducer = _own_reducer(self)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    # Neither variables nor built: Keras has the message for it.
    if reducer.is_reduced or not grads or (trainable_variables is None and not self.built):
        return plain_apply(self, grads, trainable_variables)
    grads = reducer.weigh(grads)
    variables = self._trainable_variables if trainable_variables is None else trainable_variables
    if not (accumulates(self) and _CLIPS_ACCUMULATED):
        return plain_apply(self, reducer.reduce(grads, variables), trainable_variables)

    # Values that overwrite their variable are few and small, and Keras joins them before the method
    # hooked below.
    if any(map(is_overwritten, variables)):
        values = [g if is_overwritten(v) else None for g, v in zip(grads, variables, strict=True)]
        reduced = reducer.reduce(values, variables)
        grads = [g if r is None else r for g, r in zip(grads, reduced, strict=True)]
    num_before = reducer.num_reductions
    reducer.step_variables = variables
    plain_apply(self, grads, trainable_variables)
    reducer.check_step(num_before, num_allowed=self.gradient_accumulation_steps)
    return None


def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
    """Remember whose gradients are to be clipped: Keras does not tell `_clip_gradients`."""
    reducer = _own_reducer(self)
    reducer.clip_variables = list(trainable_variables)
    try:
        type(self)._backend_apply_gradients(self, grads, trainable_variables)
    finally:
        reducer.clip_variables = None


def _clip_gradients(self: Any, grads: Sequence[Gradient]) -> Any:
    """Reduce what was accumulated, where Keras ends the accumulation; then clip."""
    reducer = _own_reducer(self)
    if not reducer.is_reduced and reducer.clip_variables is not None and accumulates(self):
        grads = reducer.reduce_accumulated(grads)
    return type(self)._clip_gradients(self, grads)


def _scale_loss(self: Any, loss: Any) -> Any:
    """Let the loss weigh as much as this rank has of a strategy's joint batch."""
    return type(self).scale_loss(self, weigh_loss(self, loss))


def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> list[Any]:  # noqa: ARG001
    """Reduce nothing: it is done, and Keras would let every update wait for all reductions."""
    return list(grads_and_vars)


def _build(self: Any, variables: Any) -> None:
    """Build outside of the function that is being traced, and distribute what is created only then.

    ScheduleFreeAdamW copies the weights when it is built; built within a function it loses them.
    """
    with tf.init_scope():
        type(self).build(self, variables)
    if is_multi(self):
        _distribute_leaves(self)


_HOOKS: dict[str, Callable[..., Any]] = {
    "build": _build,
    "apply": _apply,
    "_backend_apply_gradients": _backend_apply_gradients,
    "_clip_gradients": _clip_gradients,
    "_all_reduce_sum_gradients": _all_reduce_sum_gradients,
    "scale_loss": _scale_loss,
}
_MULTI_HOOKS: dict[str, Callable[..., Any]] = {"build": _build, "scale_loss": _scale_loss}
