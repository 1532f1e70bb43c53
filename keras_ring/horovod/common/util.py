"""Small helpers that scripts of Horovod's users import."""

from __future__ import annotations

from typing import Any


def gpu_available(ext_base_name: str = "", verbose: bool = False) -> bool:  # noqa: ARG001
    """Return whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """Return the operation that `op` or the older `average` asks for."""
    from keras_ring.horovod.operations import Average, Sum

    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Give one of them.")
    if op is not None:
        return op
    return Sum if average is False else Average
