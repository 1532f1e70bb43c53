"""Horovod's compressors."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Makes a tensor smaller before it is sent, and restores it; to be derived from."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the smaller tensor, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:  # noqa: ARG004
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors as 16 bits.

    The collectives do it between hosts and keep sums in the tensor's dtype; see `compression` of
    `keras_ring.allreduce`. The methods are for compressors that build on this one.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and its dtype."""
        import tensorflow as tf

        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its dtype."""
        import tensorflow as tf

        return tf.cast(tensor, ctx)


class Compression:
    """What `compression=` takes, beside `Compressor` classes of one's own."""

    none = NoneCompressor
    fp16 = FP16Compressor


def codec_of(compression: Any) -> Any:
    """Return what keras_ring calls a compressor; None when it runs outside, or does nothing."""
    return "fp16" if compression is FP16Compressor else None


def own_compressor(compression: Any) -> Any:
    """Return a compressor of the user's own; None for those above."""
    return None if compression in (None, NoneCompressor, FP16Compressor) else compression
