"""What `keras-ring check` runs on each rank: right sums, and how fast they come."""

from __future__ import annotations

import time

import keras
import numpy as np
import tensorflow as tf

from keras_ring import collectives, native, runtime
from keras_ring.errors import InternalError

_MIB = 1 << 20
_SIZES = (4, 4 * _MIB, 64 * _MIB)
_NUM_TRIES = 7


def run() -> dict[str, str]:
    """Add numbers on all ranks, and time it.

    Returns:
        What is loaded, and for tensors of 4 bytes, 4 MiB and 64 MiB the best time of an allreduce
        and its bandwidth: bytes of the tensor a second.

    Raises:
        InternalError: A sum is wrong.

    Collective: every rank calls it.
    """
    runtime.init()
    found = {
        "TensorFlow": str(tf.__version__),
        "Keras": str(keras.__version__),
        "MPI": native.running_mpi(),
        "libraries built for": native.compiled_mpi(),
        "XLA": native.xla_problem() or "can compile collectives",
        "ranks": f"{runtime.size()} on {runtime.num_nodes()} host(s)",
    }
    for num_bytes in _SIZES:
        best_s = min(_time_of_allreduce(num_bytes) for _ in range(_NUM_TRIES))
        name = f"{num_bytes} bytes" if num_bytes < _MIB else f"{num_bytes // _MIB} MiB"
        speed = f", {num_bytes / best_s / 1e9:.2f} GB/s" if num_bytes >= _MIB else ""
        found[f"allreduce {name}"] = f"{best_s * 1e3:.3f} ms{speed}"
    runtime.shutdown()
    return found


def _time_of_allreduce(num_bytes: int) -> float:
    size, rank = runtime.size(), runtime.rank()
    # Small whole numbers: their sums are exact in any order.
    own = tf.constant((np.arange(num_bytes // 4) % 1000 + rank).astype(np.float32))
    collectives.barrier()
    started = time.perf_counter()
    total = collectives.allreduce(own, "sum", name=f"self_test/{num_bytes}").numpy()
    took_s = time.perf_counter() - started
    expected = (own.numpy() - rank) * size + size * (size - 1) / 2
    wrong = np.flatnonzero(total != expected)
    if len(wrong):
        at = wrong[0]
        raise InternalError(
            f"self-test: rank {rank}: allreduce of {num_bytes} bytes: element {at} is {total[at]}; "
            f"expected {expected[at]}. Report this with the output of keras-ring check."
        )
    return took_s
