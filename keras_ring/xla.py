"""Collectives in functions that XLA compiles (`jit_compile=True`).

XLA cannot compile TensorFlow's custom ops, but its programs may call out: each collective becomes a
small StableHLO program around a custom call, which `XlaCallModule` puts into the function. The
handlers are in tf_ops/ops/xla_handlers.cc. They return at once, so that the program goes on while
the ranks communicate, and match calls by name like the ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from keras_ring import graphs, native
from keras_ring.errors import ConfigError, NativeLibraryError
from keras_ring.process_sets import ProcessSet, of_op, rank_in, size_of

Tensor: TypeAlias = Any

# The first version of XlaCallModule whose programs may return several values in any form that is
# used here; later ones are compatible.
_MODULE_VERSION = 9
# Custom calls of the typed interface.
_API_VERSION = 4
# Where a graph keeps the number of its run, and what that is.
_RUN = "_keras_ring_run"
_RUN_TYPE = "tensor<i64>"

_ELEMENT_TYPES = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}

# Whose results are like their inputs, and take their memory.
_IN_PLACE = ("allreduce", "broadcast", "barrier")
# What XLA cannot take, because …
_REFUSED = {
    "alltoall": "how many rows a rank gets is known only when it runs",
    "join": "it waits for what the other ranks call meanwhile",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective that was compiled, as its derivative sees it: like a `tf.Operation`."""

    type: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    attributes: Mapping[str, str]

    def get_attr(self, name: str) -> bytes:
        """Return the value of an attribute."""
        return self.attributes[name].encode()


def is_compiling() -> bool:
    """Return whether what is called now becomes part of a function that XLA compiles."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def lower(
    kind: str,
    inputs: Sequence[Tensor],
    attributes: Mapping[str, str],
    label: str,
    derivative: Callable[..., Any],
) -> list[Tensor]:
    """Put a collective into the function that XLA is going to compile.

    Args:
        kind: Such as "allreduce".
        inputs: Tensors.
        attributes: Those of the op.
        label: What messages call the tensor.
        derivative: Takes a `Call` and the gradients of its outputs; returns those of its inputs.

    Returns:
        The results, one for each input.

    Raises:
        ConfigError: A shape is not known, or XLA cannot take this collective, or not here.
        NativeLibraryError: This TensorFlow is too old.
    """
    if kind in _REFUSED:
        raise ConfigError(
            f"{kind} {label!r} cannot be part of a function that XLA compiles (jit_compile=True), "
            f"because {_REFUSED[kind]}. Call it outside of that function, or leave "
            "jit_compile=True out."
        )
    problem = native.xla_problem()
    if problem:
        raise NativeLibraryError(
            f"{kind} {label!r} cannot be compiled by XLA: {problem} (TensorFlow {tf.__version__}). "
            "Install TensorFlow 2.20 or later, or leave jit_compile=True out."
        )
    _check_place(kind, label)
    inputs = list(inputs)
    shapes = [_static_shape(kind, label, tensor) for tensor in inputs]
    process_set = of_op(Call(kind, (), (), attributes))
    results = [_result_shape(kind, shape, process_set) for shape in shapes]
    types = [_ELEMENT_TYPES[tensor.dtype.name] for tensor in inputs]
    program = _program(
        kind,
        [
            *(_tensor_type(shape, type_) for shape, type_ in zip(shapes, types, strict=True)),
            _RUN_TYPE,
        ],
        [_tensor_type(shape, type_) for shape, type_ in zip(results, types, strict=True)],
        attributes,
    )

    run = _run_of(graphs.function_graph(tf.compat.v1.get_default_graph()))

    def emit(tensors: Sequence[Tensor]) -> Any:
        return _call_module(program, [*tensors, run], [t.dtype for t in tensors], results)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*tensors: Tensor) -> Any:
        outputs = emit(tensors)

        def gradient(*upstream: Tensor) -> Any:
            op = Call(f"KerasRing{kind.capitalize()}", tensors, outputs, attributes)
            return derivative(op, *upstream)

        return outputs, gradient

    return list(call(*inputs)) if inputs else emit([])


def _call_module(
    program: str, inputs: Sequence[Tensor], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    # Not a public module; only who compiles needs it.
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    outputs = gen_xla_ops.xla_call_module(
        args=inputs,
        version=_MODULE_VERSION,
        module=program,
        Tout=dtypes,
        Sout=shapes,
        platforms=("CPU",),
    )
    return list(outputs) if dtypes else []


def _run_of(graph: Any) -> Tensor:
    """Return the number of the run that `graph` is in, which its program finds out by a call.

    When one call of a run fails, XLA leaves out those that have not begun. So this rank's others
    must be given up too, or the other ranks' would wait for what never comes.
    """
    if getattr(graph, _RUN, None) is None:
        with graph.as_default(), tf.control_dependencies(None):
            (run,) = _call_module(_program("run", [], [_RUN_TYPE], {}), [], [tf.int64], [[]])
        setattr(graph, _RUN, run)
    return getattr(graph, _RUN)


def _check_place(kind: str, label: str) -> None:
    """Refuse what stands in a function that is called by the one that is compiled.

    If that is called twice, both calls have the same name. TensorFlow runs them one after the
    other; XLA runs them in any order, another one on each rank.
    """
    graph = graphs.function_graph(tf.compat.v1.get_default_graph())
    # The context is that of the compiled function itself, or was entered where it is called.
    around = (graph, getattr(graph, "outer_graph", None))
    if not any(one is not None and control_flow_util.InXlaContext(one) for one in around):
        raise ConfigError(
            f"{kind} {label!r} stands in a tf.function that is called by a function with "
            "jit_compile=True. Called twice, both calls would have one name, and XLA runs them in "
            "any order. Leave @tf.function out of the inner one."
        )


def _static_shape(kind: str, label: str, tensor: Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ConfigError(
            f"{kind} {label!r}: XLA (jit_compile=True) needs to know every dimension while the "
            f"function is traced, but the tensor has shape {tensor.shape}. Set it with "
            "tf.ensure_shape, call the collective outside of the function, or leave "
            "jit_compile=True out."
        )
    return list(tensor.shape.as_list())


def _result_shape(kind: str, shape: list[int], process_set: ProcessSet | None) -> list[int]:
    if kind in _IN_PLACE:
        return shape
    rows, *row = shape
    if kind == "allgather":
        return [rows * size_of(process_set), *row]
    own_rows, left = divmod(rows, size_of(process_set))
    return [own_rows + (rank_in(process_set) < left), *row]


def _tensor_type(shape: Sequence[int], type_: str) -> str:
    return f"tensor<{''.join(f'{dimension}x' for dimension in shape)}{type_}>"


def _program(
    kind: str, inputs: Sequence[str], results: Sequence[str], attributes: Mapping[str, str]
) -> str:
    """Return the text of a program that makes the call and nothing else."""
    arguments = [f"%a{i}" for i in range(len(inputs))]
    outputs = [f"%r#{i}" for i in range(len(results))]
    config = ", ".join(f"{name} = {_quoted(value)}" for name, value in attributes.items())
    of_tuple = "{i}" if len(results) > 1 else ""
    aliases = ", ".join(
        "#stablehlo.output_operand_alias<output_tuple_indices = ["
        + of_tuple.format(i=i)
        + f"], operand_index = {i}, operand_tuple_indices = []>"
        for i in range(len(results) if kind in _IN_PLACE else 0)
    )
    parameters = ", ".join(f"{a}: {t}" for a, t in zip(arguments, inputs, strict=True))
    assigned = f"%r:{len(results)} = " if results else ""
    returned = f"{', '.join(outputs)} : {', '.join(results)}" if results else ""
    # With a side effect, a call is never folded, merged with an equal one, or left out.
    return f"""module @keras_ring {{
  func.func public @main({parameters}) -> ({", ".join(results)}) {{
    {assigned}stablehlo.custom_call @keras_ring_{kind}({", ".join(arguments)}) {{
      api_version = {_API_VERSION} : i32,
      has_side_effect = true,
      backend_config = {{{config}}},
      output_operand_aliases = [{aliases}]
    }} : ({", ".join(inputs)}) -> ({", ".join(results)})
    return {returned}
  }}
}}"""


def _quoted(value: str) -> str:
    """As a string of MLIR, in which any byte may be written as two hexadecimal digits."""
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_/.#:-+@ "
    return '"' + "".join(chr(b) if b in plain else f"\\{b:02X}" for b in value.encode()) + '"'
