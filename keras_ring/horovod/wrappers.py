"""Horovod's wrappers of optimizers and tapes."""

from __future__ import annotations

from typing import Any

import keras

from keras_ring.errors import ConfigError
from keras_ring.horovod.common.exceptions import as_horovod_raises
from keras_ring.horovod.common.process_sets import global_process_set, native
from keras_ring.horovod.compression import Compression, codec_of, own_compressor
from keras_ring.horovod.operations import Average, name_of
from keras_ring.optimizer import distribute
from keras_ring.reducer import leave_to_rank
from keras_ring.reduction import Reduction, as_layers
from keras_ring.tape import DistributedGradientTape as Tape


def reduction_of(
    what: str,
    *,
    compression: Any,
    op: Any,
    process_set: Any,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
    gradient_factor: float = 1.0,
) -> Reduction:
    """Return what Horovod's arguments ask for.

    Args:
        what: Who was given them, for messages.
        compression: A `Compression`.
        op: `Average` or `Sum`.
        process_set: A `ProcessSet`.
        sparse_as_dense: See `keras_ring.DistributedOptimizer`.
        gradient_predivide_factor: See `keras_ring.reduction.Reduction`.
        num_groups: Into how many groups gradients are divided; 0: as is fastest.
        groups: The same, or lists of variables.
        scale_local_gradients: See `keras_ring.PartialDistributedOptimizer`.
        local_layers: See `keras_ring.PartialDistributedOptimizer`.
        gradient_factor: What reduced gradients are multiplied with.
    """
    compressor = own_compressor(compression)
    if compressor is not None and not _is_compressor(compressor):
        raise ConfigError(f"{what}: compression is {compression!r}; expected a Compressor class.")
    if num_groups and groups is not None:
        raise ConfigError(f"{what}: give num_groups or groups, not both.")
    return Reduction(
        op=name_of(op),
        compression=codec_of(compression),
        process_set=native(process_set),
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else (num_groups or None),
        local_layers=as_layers(local_layers, what),
        scales_local=scale_local_gradients,
        factor=gradient_factor,
        compressor=compressor,
    )


def _is_compressor(compressor: Any) -> bool:
    return callable(getattr(compressor, "compress", None)) and callable(
        getattr(compressor, "decompress", None)
    )


def distribute_keras(
    what: str,
    optimizer: Any,
    name: str | None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **arguments: Any,
) -> Any:
    """Do what Horovod's `DistributedOptimizer` does to a Keras optimizer, and return it.

    Args:
        what: Who was called, for messages.
        optimizer: A Keras optimizer.
        name: See `keras_ring.DistributedOptimizer`.
        backward_passes_per_step: Batches whose gradients are joined to one step; done by Keras's
            own accumulation.
        average_aggregated_gradients: Whether they are averaged rather than added.
        **arguments: For `reduction_of`.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ConfigError(
            f"{what} takes optimizers of Keras 3, but got {kind.__module__}.{kind.__qualname__}. "
            "Those of tf.compat.v1 and of Keras 2 are gone with TensorFlow 2.16; use "
            "keras.optimizers."
        )
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"{what}: backward_passes_per_step is {backward_passes_per_step}; expected at least 1."
        )
    if backward_passes_per_step > 1:
        _accumulate(what, optimizer, backward_passes_per_step)
        if not average_aggregated_gradients:
            # Keras averages.
            arguments["gradient_factor"] = float(backward_passes_per_step)
    reduction = reduction_of(what, **arguments)
    if reduction.op not in ("mean", "sum"):
        raise ConfigError(f"{what}: op is {reduction.op!r}; expected Average or Sum.")
    distribute(optimizer, reduction, name, what)
    # Past Keras's __setattr__, which is for state.
    vars(optimizer)["register_local_var"] = lambda var: leave_to_rank(optimizer, var)
    return optimizer


def _accumulate(what: str, optimizer: Any, steps: int) -> None:
    present = getattr(optimizer, "gradient_accumulation_steps", None)
    if present == steps:
        return
    if present or optimizer.built or not hasattr(optimizer, "gradient_accumulation_steps"):
        raise ConfigError(
            f"{what}: backward_passes_per_step={steps} asks for gradient accumulation, and the "
            "optimizer has been used, has another gradient_accumulation_steps, or knows none. "
            f"Create it with gradient_accumulation_steps={steps}."
        )
    optimizer.gradient_accumulation_steps = steps


@as_horovod_raises
def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer apply all ranks' gradients; see `keras_ring.DistributedOptimizer`."""
    return distribute_keras(
        "DistributedOptimizer",
        optimizer,
        name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


class _HorovodTape(Tape):
    """A tape whose `gradient` takes Horovod's arguments, too."""

    def __init__(self, gradtape: Any, reduction: Reduction) -> None:
        self._wrap(gradtape, reduction, "tape")

    @as_horovod_raises
    def gradient(  # type: ignore[override]
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002
        **keywords: Any,
    ) -> Any:
        """Return all ranks' gradients; `unconnected_gradients` is taken, too."""
        return super().gradient(target, sources, output_gradients, **keywords)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # noqa: ARG002
    ) -> tuple[Any, Any]:
        """Return this rank's gradients, and those reduced over all ranks."""
        local = self._tape.gradient(target, sources, output_gradients)
        return local, self._reduce(local, sources)


@as_horovod_raises
def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape so that its gradients are all ranks'; see keras_ring's."""
    return PartialDistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        None,
        scale_local_gradients,
    )


@as_horovod_raises
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape; the variables of `local_layers` keep this rank's gradients."""
    reduction = reduction_of(
        "DistributedGradientTape",
        compression=compression,
        op=op,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        local_layers=local_layers,
    )
    return _HorovodTape(gradtape, reduction)
