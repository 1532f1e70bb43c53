"""From a public function to the op: what it takes, how it is run, how it fails."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from keras_ring import native, xla
from keras_ring.collectives.naming import label_of
from keras_ring.errors import ConfigError, from_tf

Tensor: TypeAlias = Any

_OP_TYPES = frozenset(
    (
        "KerasRingAllreduce",
        "KerasRingReducescatter",
        "KerasRingAllgather",
        "KerasRingAlltoall",
        "KerasRingBroadcast",
        "KerasRingBarrier",
    )
)
# Stateful ops are chained one after the other by `tf.function`, each waiting for the one before,
# which would keep communication from running beside the backward pass. Ours must run, but in any
# order: they are matched by name. The set is private; tests/parallel/test_graphs.py notices when
# it is gone.
auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= _OP_TYPES

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = frozenset(("bool", *_INTEGERS, *_FLOATS, "complex64", "complex128"))


def as_tensors(tensors: Sequence[Tensor], kind: str, name: str) -> list[Tensor]:
    """Return what was given as tensors, of dtypes that the collectives know."""
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for value in values:
        if value.dtype.name not in _DTYPES:
            raise ConfigError(
                f"{kind} {label_of(name)!r}: dtype {value.dtype.name} is not supported; expected "
                f"one of {sorted(_DTYPES)}. For Python objects use broadcast_object or "
                "allgather_object."
            )
    return values


# By kind of collective; derivatives.py fills it.
_derivatives: dict[str, Callable[..., Any]] = {}


def derivative_of(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the derivative of a collective, compiled or not."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        tf.RegisterGradient(f"KerasRing{kind.capitalize()}")(function)
        _derivatives[kind] = function
        return function

    return register


def run(kind: str, /, **arguments: Any) -> Any:
    """Call the op of a collective, or its form for XLA; its errors become those of keras_ring."""
    op = getattr(native.ops(), f"keras_ring_{kind}")
    if xla.is_compiling():
        inputs = arguments.pop("x", ())
        label = label_of(arguments["tensor_name"])
        return xla.lower(kind, inputs, arguments, label, _derivatives.get(kind, _no_derivative))
    try:
        return op(**arguments)
    except tf.errors.OpError as error:
        raise from_tf(error) from None


def _no_derivative(op: Any, *upstream: Tensor) -> list[Tensor | None]:  # noqa: ARG001
    return [None] * len(op.inputs)


def check_one_dtype(values: Sequence[Tensor], kind: str, name: str) -> None:
    """Refuse a group of several dtypes."""
    if any(value.dtype != values[0].dtype for value in values):
        raise ConfigError(
            f"{kind} {label_of(name)!r}: the tensors of a group share one dtype, but these are "
            f"{[value.dtype.name for value in values]}; make one group for each."
        )


def check_rows(values: Sequence[Tensor], kind: str, name: str) -> None:
    """Refuse scalars, which have no rows."""
    if any(value.shape.rank == 0 for value in values):
        raise ConfigError(
            f"{kind} {label_of(name)!r} takes tensors with at least one dimension, but got "
            "a scalar; reshape it to (1,)."
        )
