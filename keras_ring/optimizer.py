"""Make a Keras optimizer apply the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_ring.compression import Compression
from keras_ring.errors import ConfigError
from keras_ring.optimizer_hooks import install
from keras_ring.process_sets import ProcessSet
from keras_ring.reducer import Reducer
from keras_ring.reduction import Op, Reduction, as_layers

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "distribute"]


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
    - In `fit` all ranks do what a callback of one does: they stop together, and a learning rate
      that it changes between epochs is that of all. `EarlyStopping`, `ReduceLROnPlateau` and
      `ModelCheckpoint` see the mean of the ranks' metrics. Where ranks name the same file, the
      first rank alone writes it.
    - An epoch of `fit` ends on all ranks with the first that has no more batches, with a warning;
      each step averages the gradients of all ranks.

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
    install(optimizer, Reducer(reduction, name))
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
