"""How the gradients of an optimizer or a tape become one over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from keras_ring.compression import Compression, attribute_of
from keras_ring.errors import ConfigError
from keras_ring.process_sets import ProcessSet

Op: TypeAlias = Literal["mean", "sum", "adasum"]


@dataclass(frozen=True)
class Reduction:
    """What the user has asked for; the same on every rank.

    Attributes:
        op: `"mean"`, `"sum"` or, of dense gradients, `"adasum"`.
        compression: See `allreduce`.
        process_set: The ranks whose gradients are reduced. None: all.
        sparse_as_dense: Whether `tf.IndexedSlices` are made dense first, and reduced by allreduce.
        predivide_factor: With "mean": what gradients are divided by before they are summed; the sum
            is then divided by size / factor.
        groups: Which gradients are reduced as one request, all or none: lists of variables, or into
            how many groups all are divided. None: small ones share requests, see
            gradient_groups.py.
        local_layers: Layers whose variables belong to this rank alone.
        local_variables: Variables that do.
        scales_local: Whether local gradients are divided by the number of ranks under "mean", which
            makes them those of the mean of all ranks' losses.
        factor: What reduced gradients are multiplied with.
        compressor: What makes a gradient smaller before it is sent: an object with `compress` and
            `decompress`, as Horovod has them.
    """

    op: Op = "mean"
    compression: Compression | None = None
    process_set: ProcessSet | None = None
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = field(default=None, compare=False)
    local_layers: Sequence[Any] = field(default=(), compare=False)
    local_variables: Sequence[Any] = field(default=(), compare=False)
    scales_local: bool = True
    factor: float = 1.0
    compressor: Any = None

    def check(self, what: str) -> None:
        """Raise what is wrong with it.

        Args:
            what: Who was given it, for messages.

        Raises:
            ConfigError: `op` or `compression` is unknown, or a number is out of its range.
        """
        if self.op not in get_args(Op):
            raise ConfigError(
                f"{what}: op is {self.op!r}; expected one of {', '.join(map(repr, get_args(Op)))}."
            )
        attribute_of(self.compression, what)
        if self.op == "adasum" and (self.compression or self.factor != 1):
            raise ConfigError(f"{what}: op='adasum' goes without compression and accumulation.")
        if not self.predivide_factor > 0 or (self.predivide_factor != 1 and self.op != "mean"):
            raise ConfigError(
                f"{what}: gradient_predivide_factor is {self.predivide_factor!r} and op is "
                f"{self.op!r}; expected a positive factor, and 1 unless op is 'mean'."
            )
        if isinstance(self.groups, int) and self.groups < 1:
            raise ConfigError(f"{what}: groups is {self.groups}; expected at least 1, or None.")

    def local_ids(self) -> set[int]:
        """Return the `identity` of each variable that is this rank's alone.

        Layers may have got their variables only now.
        """
        of_layers = [v for layer in self.local_layers for v in layer.trainable_variables]
        return {identity(variable) for variable in (*of_layers, *self.local_variables)}


def identity(variable: Any) -> int:
    """Return what a Keras variable and the TensorFlow variable inside it have in common.

    Sources may be either: `tape.watched_variables()` knows TensorFlow's alone.

    Args:
        variable: A `keras.Variable`, a `tf.Variable` or a tensor.
    """
    # Not `value`, which is a cast copy under a policy of mixed precision.
    inner = getattr(variable, "_value", None)
    return id(variable if inner is None else inner)


def as_layers(layers: Any, what: str) -> tuple[Any, ...]:
    """Return one layer or several as a tuple.

    Args:
        layers: A `keras.layers.Layer`, or an iterable of them; None for none.
        what: Who was given them, for messages.

    Raises:
        ConfigError: Some are no layers.
    """
    if layers is None:
        return ()
    given = (layers,) if hasattr(layers, "trainable_variables") else tuple(layers)
    for layer in given:
        if not hasattr(layer, "trainable_variables"):
            raise ConfigError(
                f"{what}: local_layers has an object of {type(layer).__name__}; expected Keras "
                "layers."
            )
    return given
