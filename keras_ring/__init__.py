"""Distributed data-parallel training of Keras 3 models by ring-allreduce.

The names are loaded when they are first used, so that the command line, which needs no
TensorFlow, starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_ring import callbacks as callbacks
    from keras_ring import compression as compression
    from keras_ring import data as data
    from keras_ring.collectives import (
        allgather as allgather,
    )
    from keras_ring.collectives import (
        allreduce as allreduce,
    )
    from keras_ring.collectives import (
        alltoall as alltoall,
    )
    from keras_ring.collectives import (
        barrier as barrier,
    )
    from keras_ring.collectives import (
        broadcast as broadcast,
    )
    from keras_ring.collectives import (
        grouped_allgather as grouped_allgather,
    )
    from keras_ring.collectives import (
        grouped_allreduce as grouped_allreduce,
    )
    from keras_ring.collectives import (
        grouped_broadcast as grouped_broadcast,
    )
    from keras_ring.collectives import (
        grouped_reducescatter as grouped_reducescatter,
    )
    from keras_ring.collectives import (
        join as join,
    )
    from keras_ring.collectives import (
        reducescatter as reducescatter,
    )
    from keras_ring.errors import (
        ConfigError as ConfigError,
    )
    from keras_ring.errors import (
        InternalError as InternalError,
    )
    from keras_ring.errors import (
        KerasRingError as KerasRingError,
    )
    from keras_ring.errors import (
        LaunchError as LaunchError,
    )
    from keras_ring.errors import (
        MismatchError as MismatchError,
    )
    from keras_ring.errors import (
        NativeLibraryError as NativeLibraryError,
    )
    from keras_ring.errors import (
        PeerLostError as PeerLostError,
    )
    from keras_ring.errors import (
        StallError as StallError,
    )
    from keras_ring.launch.function import run as run
    from keras_ring.objects import allgather_object as allgather_object
    from keras_ring.objects import broadcast_object as broadcast_object
    from keras_ring.optimizer import DistributedOptimizer as DistributedOptimizer
    from keras_ring.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
    from keras_ring.process_set_changes import add_process_set as add_process_set
    from keras_ring.process_set_changes import remove_process_set as remove_process_set
    from keras_ring.process_sets import ProcessSet as ProcessSet
    from keras_ring.runtime import (
        init as init,
    )
    from keras_ring.runtime import (
        is_initialized as is_initialized,
    )
    from keras_ring.runtime import (
        local_rank as local_rank,
    )
    from keras_ring.runtime import (
        local_size as local_size,
    )
    from keras_ring.runtime import (
        node_rank as node_rank,
    )
    from keras_ring.runtime import (
        num_nodes as num_nodes,
    )
    from keras_ring.runtime import (
        rank as rank,
    )
    from keras_ring.runtime import (
        shutdown as shutdown,
    )
    from keras_ring.runtime import (
        size as size,
    )
    from keras_ring.runtime import (
        start_timeline as start_timeline,
    )
    from keras_ring.runtime import (
        stop_timeline as stop_timeline,
    )
    from keras_ring.saving import load_model as load_model
    from keras_ring.strategy import RingStrategy as RingStrategy
    from keras_ring.tape import DistributedGradientTape as DistributedGradientTape
    from keras_ring.tape import PartialDistributedGradientTape as PartialDistributedGradientTape
    from keras_ring.variables import broadcast_variables as broadcast_variables

__version__ = "0.1.0"

_MODULE_OF = {
    **dict.fromkeys(
        (
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
        ),
        "collectives",
    ),
    **dict.fromkeys(
        (
            "ConfigError",
            "InternalError",
            "KerasRingError",
            "LaunchError",
            "MismatchError",
            "NativeLibraryError",
            "PeerLostError",
            "StallError",
        ),
        "errors",
    ),
    **dict.fromkeys(("allgather_object", "broadcast_object"), "objects"),
    **dict.fromkeys(("add_process_set", "remove_process_set"), "process_set_changes"),
    "ProcessSet": "process_sets",
    **dict.fromkeys(
        (
            "init",
            "is_initialized",
            "local_rank",
            "local_size",
            "node_rank",
            "num_nodes",
            "rank",
            "shutdown",
            "size",
            "start_timeline",
            "stop_timeline",
        ),
        "runtime",
    ),
    **dict.fromkeys(("DistributedGradientTape", "PartialDistributedGradientTape"), "tape"),
    **dict.fromkeys(("DistributedOptimizer", "PartialDistributedOptimizer"), "optimizer"),
    "RingStrategy": "strategy",
    "broadcast_variables": "variables",
    "callbacks": "callbacks",
    "compression": "compression",
    "data": "data",
    "load_model": "saving",
    "run": "launch.function",
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'keras_ring' has no attribute {name!r}")
    if name == "init":
        # Adapts Keras's progress bar to the world that init joins.
        importlib.import_module("keras_ring.progress")
        # Adds the process sets that init is given.
        importlib.import_module("keras_ring.process_set_changes")
    module = importlib.import_module(f"keras_ring.{_MODULE_OF[name]}")
    value = module if name == _MODULE_OF[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(set(globals()) | set(__all__))
