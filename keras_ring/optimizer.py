"""Make a Keras optimizer apply the gradients of all ranks.

The hooks are bound to the optimizer object, not to a subclass or a wrapper around it: its class,
config and state stay what they are, so what `model.save` writes loads in plain Keras. What a
gradient may be, gradients.py knows.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ring import joint_step
from keras_ring.compression import Compression
from keras_ring.errors import ConfigError, InternalError
from keras_ring.gradients import Gradient, is_overwritten
from keras_ring.keras_patches import patch_loss_scaling, patch_pickling
from keras_ring.process_sets import ProcessSet
from keras_ring.reducer import (
    Reducer,
    accumulates,
    attach,
    is_multi,
    leaves,
    reducer_of,
    weigh_loss,
)
from keras_ring.reduction import Op, Reduction, as_layers

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "adopt",
    "adopt_when_applied",
    "distribute",
]

# Keras 3.0 clips each batch's gradients and then adds them up. What is clipped must have been
# reduced, so there each batch is reduced. Later versions clip the sum, within this method: one
# reduction for all batches of a step.
_CLIPS_ACCUMULATED = (
    "_clip_gradients" in keras.optimizers.Optimizer._backend_apply_gradients.__code__.co_names
    if hasattr(keras.optimizers.Optimizer, "_backend_apply_gradients")
    else False
)


def DistributedOptimizer(  # noqa: N802 (as users of Horovod know it)
    optimizer: Any,
    *,
    op: Op = "mean",
    name: str | None = None,
    compression: Compression | None = None,
    process_set: ProcessSet | None = None,
    sparse_as_dense: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks, and return it.

    Every rank computes the gradients of its own batch. The optimizer reduces them over all ranks
    before it does anything else (unscale, clip, decay weights, average weights, update), so that a
    step on N ranks is the step that one process takes on the N batches joined. Requests are sent as
    backprop produces the gradients and run beside it.

    `optimizer` itself is changed and returned: its class, its config and the state it has gathered
    stay as they are. A model compiled with it is saved as with the plain optimizer and loads
    without keras_ring; load it with `keras_ring.load_model` to go on training on all ranks. A copy
    made by `from_config(optimizer.get_config())` is plain. Wrapping twice changes nothing. A model
    that has been trained must be compiled again after its optimizer was wrapped: Keras keeps the
    function that it has traced.

    - With `gradient_accumulation_steps` there is one reduction for each update, not for each batch
      (Keras 3.0: for each batch).
    - With `LossScaleOptimizer`, which `compile` adds under the policy "mixed_float16", a step in
      which one rank's gradients overflow is skipped on all ranks.
    - The learning rate is not scaled with the number of ranks.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, its name such as `"adam"`, or its config as a
            dictionary.
        op: `"mean"` to average gradients over ranks, for a loss that is the mean over a batch, or
            `"sum"`. Defaults to `"mean"`.
        name: Tells this optimizer's requests from those of others; the same on every rank. Needed
            only if ranks use their optimizers in different order. Defaults to a number, in order of
            first use.
        compression: "fp16" or "bf16": between hosts dense float32 and float64 gradients travel as
            16 bits; see `allreduce`. With "fp16" a sum over hosts beyond 65504 becomes infinite,
            which `LossScaleOptimizer` takes for an overflow and others do not notice. Defaults to
            None.
        process_set: The ranks whose gradients are reduced; only they use the optimizer. Defaults to
            all.
        sparse_as_dense: Reduce `tf.IndexedSlices` as dense tensors. Quicker where most rows of an
            embedding are used in each step. Defaults to False.
        groups: Gradients to reduce as one request, all or none: lists of variables, or into how
            many groups all are divided. Defaults to what is fastest: small ones share requests.

    Returns:
        The optimizer, for `model.compile` or for a loop of one's own that calls `apply` or
        `apply_gradients`.

    Raises:
        ConfigError: `optimizer` is none of Keras 3, `op` or `compression` is unknown, or the
            optimizer was wrapped with another one.

    Collective: every rank takes the same steps with optimizers over the same variables.
    Cost: one allreduce for each dense gradient, two allgathers for each sparse one.

    Example:
        model.compile(keras_ring.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")
    """
    reduction = Reduction(
        op=op,
        compression=compression,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
    )
    return distribute(optimizer, reduction, name, "DistributedOptimizer")


def PartialDistributedOptimizer(  # noqa: N802 (as users of Horovod know it)
    optimizer: Any,
    *,
    local_layers: Any,
    scale_local_gradients: bool = True,
    op: Op = "mean",
    name: str | None = None,
    compression: Compression | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks, but those of some layers.

    For layers that are not the same on all ranks, such as the parts of a model that is too large
    for one. `BroadcastInitialWeights` leaves them alone too.

    Args:
        optimizer: See `DistributedOptimizer`.
        local_layers: A Keras layer or a list of them; what belongs to this rank alone.
        scale_local_gradients: Divide local gradients by the number of ranks under "mean", which
            makes them those of the mean of all ranks' losses, as the others are. Defaults to True.
        op: See `DistributedOptimizer`.
        name: See `DistributedOptimizer`.
        compression: See `DistributedOptimizer`.
        process_set: See `DistributedOptimizer`.

    Returns:
        The optimizer.

    Raises:
        ConfigError: As `DistributedOptimizer`, or `local_layers` are no layers.

    Collective: As `DistributedOptimizer`. Every rank has as many variables, local ones included.
    Cost: As `DistributedOptimizer`.

    Example:
        optimizer = keras_ring.PartialDistributedOptimizer("adam", local_layers=[model.layers[0]])
    """
    reduction = Reduction(
        op=op,
        compression=compression,
        process_set=process_set,
        local_layers=as_layers(local_layers, "PartialDistributedOptimizer"),
        scales_local=scale_local_gradients,
    )
    return distribute(optimizer, reduction, name, "PartialDistributedOptimizer")


def distribute(optimizer: Any, reduction: Reduction, name: str | None, what: str) -> Any:
    """Do what `DistributedOptimizer` says, with any reduction.

    Args:
        optimizer: See `DistributedOptimizer`.
        reduction: How gradients are reduced.
        name: See `DistributedOptimizer`.
        what: Who was called, for messages.
    """
    reduction.check(what)
    optimizer = _as_keras_optimizer(optimizer)
    patch_loss_scaling(adopt)
    patch_pickling(_rebuild)
    _distribute(optimizer, Reducer(reduction, name))
    return optimizer


def _as_keras_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that `optimizer` is or describes."""
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            "DistributedOptimizer needs Keras on TensorFlow, and Keras runs on "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    if isinstance(optimizer, (str, dict)):
        return keras.optimizers.get(optimizer)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    hint = (
        "Create it first, with its arguments"
        if kind is optimizer
        else "Those of tf_keras (Keras 2) and tf.compat.v1 have no hooks; use keras.optimizers"
    )
    raise ConfigError(
        "DistributedOptimizer expects a keras.optimizers.Optimizer of Keras 3, its name or its "
        f"config; got {'the class' if kind is optimizer else 'an object of'} "
        f"{kind.__module__}.{kind.__qualname__}. {hint}."
    )


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
    distribute(
        getattr(copy, "optimizer", copy),
        reduction,
        reducer.name,
        "a copy of a DistributedOptimizer",
    )
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
