"""Memory for batches: used again when it is free, and never before."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from keras_ring.data.memory import Memory

SHAPE = (64, 512)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_that_is_free_is_used_again():
    memory = Memory()
    array = memory.array(SHAPE, "float32")
    first = address(array)
    del array
    assert address(memory.array(SHAPE, "float32")) == first
    assert address(memory.array((60, 512), "float32")) == first


def test_memory_of_an_array_a_view_or_a_tensor_is_left_alone():
    memory = Memory()
    array = memory.array(SHAPE, "float32")
    array[:] = 1
    view = array[3:]
    tensor = tf.convert_to_tensor(memory.array(SHAPE, "float32"))
    before = tensor.numpy().copy()
    del array
    others = [memory.array(SHAPE, "float32") for _ in range(40)]
    for other in others:
        other[:] = 7
    assert (view == 1).all()
    np.testing.assert_array_equal(tensor.numpy(), before)
    assert len({address(other) for other in others}) == len(others)


def test_arrays_are_as_asked_for_and_aligned():
    memory = Memory()
    for dtype in ("float32", "uint8", "int64"):
        array = memory.array((3, 70000), dtype)
        assert (array.shape, array.dtype) == ((3, 70000), np.dtype(dtype))
        assert address(array) % 64 == 0
    assert memory.array((2,), object).tolist() == [None, None]
    assert memory.array((0, 5), "float32").shape == (0, 5)
