"""Horovod's errors, and those of keras_ring as Horovod's users catch them.

Each error that a collective of these modules raises is a `keras_ring.KerasRingError` and, at once,
the class that Horovod raises for the same cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import tensorflow as tf

from keras_ring import errors

_Function = TypeVar("_Function", bound=Callable[..., Any])


class HorovodInternalError(RuntimeError):
    """A collective failed because another rank is gone."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Hosts were added or removed; raised by elastic training alone."""

    def __init__(self, skip_sync: bool = False) -> None:
        """Note whether the state of the workers is known to be equal."""
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The compiled library does not fit this TensorFlow; keras_ring raises NativeLibraryError."""


class _OpFieldsError(Exception):
    """Gives an error the fields that `tf.errors.OpError` has, without its constructor."""

    node_def = None
    op = None
    experimental_payloads: ClassVar[dict[Any, Any]] = {}

    def __init__(self, message: str = "") -> None:
        Exception.__init__(self, message)
        self._message = message

    @property
    def message(self) -> str:
        """Return what happened."""
        return self._message

    def __str__(self) -> str:
        return self._message


class MismatchError(_OpFieldsError, errors.MismatchError, tf.errors.FailedPreconditionError):
    """The ranks disagree on a collective."""

    error_code = tf.errors.FAILED_PRECONDITION


class ConfigError(_OpFieldsError, errors.ConfigError, tf.errors.InvalidArgumentError):
    """This rank's call is wrong."""

    error_code = tf.errors.INVALID_ARGUMENT


class PeerLostError(
    _OpFieldsError, errors.PeerLostError, HorovodInternalError, tf.errors.UnknownError
):
    """Another rank died or left."""

    error_code = tf.errors.UNKNOWN


class StallError(_OpFieldsError, errors.StallError, HorovodInternalError, tf.errors.UnknownError):
    """Another rank did not come."""

    error_code = tf.errors.UNKNOWN


_CLASS_OF = {
    errors.MismatchError: MismatchError,
    errors.ConfigError: ConfigError,
    errors.PeerLostError: PeerLostError,
    errors.StallError: StallError,
}


def as_horovod_raises(function: _Function) -> _Function:
    """Make a function raise its errors as Horovod's users catch them."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except errors.KerasRingError as error:
            cls = _CLASS_OF.get(type(error))
            if cls is None:
                raise
            raise cls(str(error)) from None

    return call  # type: ignore[return-value]
