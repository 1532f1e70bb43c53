"""Which gradients share a request."""

from __future__ import annotations

import tensorflow as tf

from keras_ring.gradient_groups import GROUP_BYTES, GROUP_TENSORS, SMALL_BYTES, plan_groups


def plan(*gradients: object) -> list[list[int]]:
    return plan_groups(gradients, ["mean"] * len(gradients))


def spec(num_bytes: int, dtype: str = "float32") -> tf.TensorSpec:
    return tf.TensorSpec((num_bytes // tf.as_dtype(dtype).size,), dtype)


def test_last_variables_come_first_and_small_ones_skip_over_large_ones() -> None:
    large, small = spec(SMALL_BYTES + 4), spec(SMALL_BYTES)

    assert plan(small, large, small, large, small) == [[4, 2, 0], [3], [1]]


def test_a_group_ends_at_its_limit_of_tensors_and_of_bytes() -> None:
    assert [len(group) for group in plan(*[spec(4)] * (2 * GROUP_TENSORS + 1))] == [
        GROUP_TENSORS,
        GROUP_TENSORS,
        1,
    ]
    assert [len(group) for group in plan(*[spec(SMALL_BYTES)] * 20)] == [
        GROUP_BYTES // SMALL_BYTES,
        20 - GROUP_BYTES // SMALL_BYTES,
    ]


def test_dtypes_and_kinds_do_not_mix() -> None:
    gradients = [spec(4), spec(4, "float16"), spec(4), spec(4)]

    assert plan_groups(gradients, ["mean", "mean", "max", "mean"]) == [[3, 0], [2], [1]]


def test_none_and_slices_are_left_out_and_open_shapes_stay_alone() -> None:
    slices = tf.IndexedSlices(tf.zeros((1, 2)), tf.zeros(1, tf.int32), tf.constant([4, 2]))

    assert plan(spec(4), None, slices, tf.TensorSpec((None,)), spec(4)) == [[4, 0], [3]]
