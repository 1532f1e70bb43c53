"""Memory for batches, used again when nobody holds them any more.

Fresh memory costs more than what is copied into it: the system clears each page when it is first
touched. And what does not begin at a multiple of 64 bytes TensorFlow copies once more.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_ALIGNMENT = 64
_NUM_KEPT = 16
# Smaller arrays come cheap from the allocator.
_MIN_BYTES = 64 * 1024


class Memory:
    """Makes arrays, of the memory of earlier ones if that is free.

    An array, or a view or tensor of it, keeps its memory for as long as it lives. For one thread.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of any content.

        Args:
            shape: Its shape.
            dtype: Its dtype.
        """
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if num_bytes < _MIN_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        owner = self._free(num_bytes)
        begin = -owner.ctypes.data % _ALIGNMENT
        return owner[begin : begin + num_bytes].view(dtype).reshape(shape)

    def _free(self, num_bytes: int) -> Any:
        """Return memory that no array has, of at least so many bytes and not much more."""
        for index in range(len(self._kept)):
            # The list's own, and that of the call itself.
            is_free = sys.getrefcount(self._kept[index]) == _REFERENCES
            if is_free and num_bytes <= self._kept[index].size - _ALIGNMENT <= 2 * num_bytes:
                self._kept.append(self._kept.pop(index))
                return self._kept[-1]
        owner = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self._kept = [*self._kept[-(_NUM_KEPT - 1) :], owner]
        return owner


def _count_references() -> int:
    """Return how many references `sys.getrefcount` sees of what is in a list and nowhere else."""
    kept = [np.empty(1, np.uint8)]
    return sys.getrefcount(kept[0])


_REFERENCES = _count_references()
