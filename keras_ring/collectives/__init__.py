"""The collectives on tensors: in eager code, `tf.function` and under XLA, with gradients.

Ranks are matched by name, so they may call in any order. All but the tensor and its operation is
given by keyword.
"""

from keras_ring.collectives import derivatives as derivatives  # registers them
from keras_ring.collectives.movements import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_broadcast,
    join,
)
from keras_ring.collectives.reductions import (
    Op,
    ScatterOp,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Op",
    "ScatterOp",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
