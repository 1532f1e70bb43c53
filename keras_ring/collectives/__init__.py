"""The collectives on tensors: in eager code and in `tf.function`, with gradients.

Ranks are matched by name, so they may call in any order. All but the tensor and its operation is
given by keyword.
"""

from keras_ring.collectives import derivatives as derivatives  # registers them
from keras_ring.collectives.movements import (
    allgather,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_broadcast,
)
from keras_ring.collectives.reductions import Op, allreduce, grouped_allreduce

__all__ = [
    "Op",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
]
