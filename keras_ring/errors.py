"""One exception class for each cause.

Each names what happened to which tensor on which rank, what was expected and received, and what to
do. Knows no TensorFlow, so that the command line can use it.
"""

import re


class KerasRingError(Exception):
    """Base of every error that keras_ring raises."""

    # While TensorFlow traces a function it raises errors anew, with the user's line in the message:
    # as the same class if that has this constructor, else as a class of its own.
    __init__ = Exception.__init__


class ConfigError(KerasRingError, ValueError):
    """This rank's call or configuration is wrong."""


class MismatchError(KerasRingError, ValueError):
    """The ranks disagree on a collective. All of them get this error and may go on."""


class PeerLostError(KerasRingError, ConnectionError):
    """Another rank died or left; no further collective of this generation can succeed."""


class StallError(KerasRingError, TimeoutError):
    """Another rank did not come."""


class NativeLibraryError(KerasRingError, ImportError):
    """The compiled libraries are missing or do not fit this TensorFlow or MPI."""


class LaunchError(KerasRingError, RuntimeError):
    """A build or a launched process failed."""


class InternalError(KerasRingError, RuntimeError):
    """A bug in keras_ring."""


# The numbers are those of `Code` in tf_ops/core/status.h.
_CLASS_OF_CODE: dict[int, type[KerasRingError]] = {
    1: ConfigError,
    2: MismatchError,
    3: PeerLostError,
    4: StallError,
    5: InternalError,
}

# The name of TensorFlow's exception class for each of ours; ops/tf_api.cc is the other end.
_CLASS_OF_TF: dict[str, type[KerasRingError]] = {
    "InvalidArgumentError": ConfigError,
    "FailedPreconditionError": MismatchError,
    "AbortedError": PeerLostError,
    "DeadlineExceededError": StallError,
    "InternalError": InternalError,
}

# Our messages begin with the collective and the quoted tensor, wherever TensorFlow puts them.
_OURS = re.compile(
    r"(?:allreduce|reducescatter|allgather|alltoall|broadcast|barrier|join) '[^']*'.*", re.DOTALL
)
_TF_SUFFIX = re.compile(r"\s*\[(?:Op:|\[\{\{node).*", re.DOTALL)

_BUG_REPORT = " This is a bug in keras_ring; report it with the output of all ranks."


def from_code(code: int, message: str) -> KerasRingError:
    """Return the error for a code of the native library.

    Args:
        code: A number of `Code` in `tf_ops/core/status.h`, not 0.
        message: What the library says.
    """
    cls = _CLASS_OF_CODE.get(code, InternalError)
    error: KerasRingError = cls(message + _BUG_REPORT if cls is InternalError else message)
    return error


def from_tf(error: Exception) -> Exception:
    """Return the keras_ring error behind an error that TensorFlow raised.

    Inside `fit` and other graphs TensorFlow raises its own class for a failed collective.

    Args:
        error: A `tf.errors.OpError`.

    Returns:
        The matching `KerasRingError`, or `error` itself when no collective of ours caused it.

    Example:
        >>> try:
        ...     model.fit(dataset)  # doctest: +SKIP
        ... except tf.errors.OpError as error:
        ...     raise keras_ring.errors.from_tf(error) from error
    """
    cls = _CLASS_OF_TF.get(type(error).__name__)
    ours = _OURS.search(str(getattr(error, "message", error)))
    if cls is None or ours is None:
        return error
    message = _TF_SUFFIX.sub("", ours.group())
    translated: KerasRingError = cls(message + _BUG_REPORT if cls is InternalError else message)
    return translated
