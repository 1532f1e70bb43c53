"""A tape whose gradients are those of all ranks, for training loops of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_ring.compression import Compression
from keras_ring.errors import ConfigError
from keras_ring.gradients import reduce_gradients
from keras_ring.process_sets import ProcessSet
from keras_ring.reduction import Op, Reduction, as_layers


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` is reduced over all ranks.

    Wrap the tape before or after recording. Everything else (`watch`, `stop_recording`, `jacobian`,
    ...) is the tape's own, of this rank alone.

    - In a `tf.function` requests are sent as backprop produces the gradients and run beside it.
    - Give the result to a plain optimizer. A `DistributedOptimizer` would reduce it again.
    - Clip what `gradient` returns: it is the joint batch's.

    Args:
        tape: A `tf.GradientTape`.
        op: `"mean"` to average gradients over ranks, for a loss that is the mean over a batch, or
            `"sum"`. Defaults to `"mean"`.
        name: Tells this tape's requests from those of others that are in use at the same time; the
            same on every rank. Defaults to "tape".
        compression: See `DistributedOptimizer`.
        process_set: The ranks that take part. Defaults to all.
        sparse_as_dense: See `DistributedOptimizer`.
        groups: See `DistributedOptimizer`.

    Raises:
        ConfigError: `tape` is none, or `op` or `compression` is unknown.

    Collective: every rank calls `gradient` with the same sources in the same order.
    Cost: one allreduce for each dense gradient, two allgathers for each sparse one.

    Example:
        >>> w = tf.Variable([2.0, 3.0])
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(w * w)
        >>> kr.DistributedGradientTape(tape).gradient(loss, w).numpy()
        array([4., 6.], dtype=float32)
    """

    def __init__(
        self,
        tape: Any,
        *,
        op: Op = "mean",
        name: str = "tape",
        compression: Compression | None = None,
        process_set: ProcessSet | None = None,
        sparse_as_dense: bool = False,
        groups: int | Sequence[Sequence[Any]] | None = None,
    ) -> None:
        """Wrap `tape`."""
        reduction = Reduction(
            op=op,
            compression=compression,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            groups=groups,
        )
        self._wrap(tape, reduction, name)

    def _wrap(self, tape: Any, reduction: Reduction, name: str) -> None:
        what = type(self).__name__
        if isinstance(tape, DistributedGradientTape):
            raise ConfigError(f"{what}: the tape is distributed already; wrap a tf.GradientTape.")
        if not callable(getattr(tape, "gradient", None)):
            raise ConfigError(f"{what}: expected a tf.GradientTape, but got {type(tape).__name__}.")
        reduction.check(what)
        self._tape = tape
        self._name = name
        self._reduction = reduction

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of all ranks' targets, reduced.

        Args:
            target: As `tf.GradientTape.gradient` takes it.
            sources: Variables or watched tensors, alone, in a list or nested.
            output_gradients: As `tf.GradientTape.gradient` takes it.
            unconnected_gradients: What stands for the gradient of a source that has none: None,
                which must then be None on every rank, or zeros. Defaults to None.

        Returns:
            The structure of `sources`, equal on all ranks. `tf.IndexedSlices` stay such and hold
            the rows of all ranks, in rank order.

        Raises:
            KerasRingError: As `keras_ring.allreduce`.

        Collective: see the class.

        Example:
            grads = tape.gradient(loss, model.trainable_variables)
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        return self._reduce(gradients, sources)

    def _reduce(self, gradients: Any, sources: Any) -> Any:
        flat = reduce_gradients(
            _flatten(gradients), _flatten(sources), self._reduction, scope=self._name
        )
        return tf.nest.pack_sequence_as(gradients, flat)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a source to this rank.

        Args:
            source: A variable of this rank alone. Under "mean" its gradient is divided by the
                number of ranks, which makes it that of the mean of all ranks' targets.
        """
        variables = (*self._reduction.local_variables, source)
        self._reduction = dataclasses.replace(self._reduction, local_variables=variables)

    def __enter__(self) -> DistributedGradientTape:
        """Begin to record, as the tape does."""
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """End recording."""
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the tape's."""
        if name == "_tape":  # not wrapped yet: a copy or a pickle asks
            raise AttributeError(name)
        return getattr(self._tape, name)


class PartialDistributedGradientTape(DistributedGradientTape):
    """A `DistributedGradientTape` that leaves the variables of some layers to this rank.

    For layers that are not the same on all ranks.

    Args:
        tape: A `tf.GradientTape`.
        local_layers: A Keras layer or a list of them.
        scale_local_gradients: See `PartialDistributedOptimizer`. Defaults to True.
        op: See `DistributedGradientTape`.
        name: See `DistributedGradientTape`.
        compression: See `DistributedGradientTape`.
        process_set: See `DistributedGradientTape`.

    Raises:
        ConfigError: As `DistributedGradientTape`, or `local_layers` are no layers.

    Collective: see `DistributedGradientTape`.

    Example:
        tape = keras_ring.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    """

    def __init__(
        self,
        tape: Any,
        *,
        local_layers: Any,
        scale_local_gradients: bool = True,
        op: Op = "mean",
        name: str = "tape",
        compression: Compression | None = None,
        process_set: ProcessSet | None = None,
    ) -> None:
        """Wrap `tape`."""
        reduction = Reduction(
            op=op,
            compression=compression,
            process_set=process_set,
            local_layers=as_layers(local_layers, type(self).__name__),
            scales_local=scale_local_gradients,
        )
        self._wrap(tape, reduction, name)


def _flatten(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure))
