"""Names of Horovod for TensorFlow 1, which TensorFlow itself no longer has."""

from __future__ import annotations

from typing import Any, NoReturn


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise: there are no global variables."""
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}): TensorFlow 2 has no global variables. Use "
        "broadcast_variables(model.variables, root_rank)."
    )


class BroadcastGlobalVariablesHook:
    """Raises: estimators are gone."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Raise."""
        raise RuntimeError(
            f"BroadcastGlobalVariablesHook({root_rank}, {device!r}): TensorFlow has no estimators "
            "since 2.16. Train with Keras and BroadcastGlobalVariablesCallback."
        )


def refuse_graph_value(value: Any, what: str) -> None:
    """Raise for a tensor of a `tf.function`, which has no value yet.

    Args:
        value: What was given.
        what: The function that it was given to.
    """
    import tensorflow as tf

    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        raise ValueError(
            f"{what} of the Keras module takes values, not tensors of a tf.function; use that of "
            "keras_ring.horovod.tensorflow."
        )
