"""The classes of errors, and how codes and TensorFlow's errors are translated to them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import tensorflow as tf

from keras_ring import errors

CLASSES = {
    errors.ConfigError: ValueError,
    errors.MismatchError: ValueError,
    errors.PeerLostError: ConnectionError,
    errors.StallError: TimeoutError,
    errors.NativeLibraryError: ImportError,
    errors.LaunchError: RuntimeError,
    errors.InternalError: RuntimeError,
}
CODES = {
    1: errors.ConfigError,
    2: errors.MismatchError,
    3: errors.PeerLostError,
    4: errors.StallError,
    5: errors.InternalError,
}
TF_CLASSES = {
    tf.errors.InvalidArgumentError: errors.ConfigError,
    tf.errors.FailedPreconditionError: errors.MismatchError,
    tf.errors.AbortedError: errors.PeerLostError,
    tf.errors.DeadlineExceededError: errors.StallError,
    tf.errors.InternalError: errors.InternalError,
}
GRAPH_MESSAGE = """Graph execution error:

Detected at node Adam/KerasRingAllreduce defined at (most recent call last):
  File "train.py", line 3, in <module>

allreduce 'dense/kernel': ranks disagree on shape: rank 0 has (2,), rank 1 has (3,). Build it.
\t [[{{node Adam/KerasRingAllreduce}}]] [Op:__inference_step_12]"""


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_also_of_a_builtin_class(cls: type[errors.KerasRingError]) -> None:
    error = cls("what happened")

    assert isinstance(error, errors.KerasRingError)
    assert isinstance(error, CLASSES[cls])
    assert str(error) == "what happened"
    assert str(pickle.loads(pickle.dumps(error))) == "what happened"


@pytest.mark.parametrize("code", CODES)
def test_code_becomes_its_class(code: int) -> None:
    error = errors.from_code(code, "allreduce 'x': why.")

    assert type(error) is CODES[code]
    assert str(error).startswith("allreduce 'x': why.")


@pytest.mark.parametrize("code", [5, 6, -1])
def test_internal_error_asks_for_a_report(code: int) -> None:
    error = errors.from_code(code, "why.")

    assert type(error) is errors.InternalError
    assert str(error) == "why. This is a bug in keras_ring; report it with the output of all ranks."


@pytest.mark.parametrize("cls", TF_CLASSES)
@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast", "barrier"])
def test_tensorflow_s_error_for_a_collective_becomes_ours(cls: type, kind: str) -> None:
    error = errors.from_tf(cls(None, None, f"{kind} 'a/b': why. [Op:KerasRing]"))

    assert type(error) is TF_CLASSES[cls]
    assert str(error).startswith(f"{kind} 'a/b': why.")
    assert "[Op:" not in str(error)


def test_graph_error_is_cut_to_our_sentence() -> None:
    error = errors.from_tf(tf.errors.FailedPreconditionError(None, None, GRAPH_MESSAGE))

    assert type(error) is errors.MismatchError
    assert str(error) == (
        "allreduce 'dense/kernel': ranks disagree on shape: rank 0 has (2,), rank 1 has (3,). "
        "Build it."
    )


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InvalidArgumentError(None, None, "Incompatible shapes: [2] vs. [3] [Op:AddV2]"),
        tf.errors.NotFoundError(None, None, "allreduce 'x': not one of ours"),
        ValueError("allreduce 'x': not TensorFlow's"),
    ],
)
def test_other_errors_are_returned_as_they_are(error: Exception) -> None:
    assert errors.from_tf(error) is error


@pytest.mark.parametrize("cls", CLASSES)
def test_error_in_a_traced_function_keeps_its_class(cls: type[errors.KerasRingError]) -> None:
    @tf.function
    def traced(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0.0:  # AutoGraph
            x += 1.0
        raise cls("what happened")

    with pytest.raises(cls, match="(?s)in user code:.*what happened"):
        traced(tf.ones(2))


def test_errors_are_loaded_without_tensorflow() -> None:
    program = "import sys; import keras_ring.errors; print('tensorflow' in sys.modules)"

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert result.stdout == "False\n"
