"""What one rank does in a benchmark; started by run.py under mpirun, one process a rank.

    python benchmarks/workers.py LIBRARY '{"NAME": ["WORK", {"ARGUMENT": VALUE}]}'

LIBRARY is keras_ring, horovod, mpi, memcpy, h5py or alone. Rank 0 prints a line of JSON for each
work. It runs in Horovod's environment too, hence the imports inside functions, and `tf.keras`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Library:
    """The few calls that the benchmarks need of a library."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank, self.size = 0, 1
        if name in ("keras_ring", "horovod"):
            if name == "keras_ring":
                import keras_ring as library
            else:
                import horovod.tensorflow as library
            self.library: Any = library
            library.init()
            self.rank, self.size = library.rank(), library.size()
        elif name in ("mpi", "memcpy"):
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.rank, self.comm.size

    def allreduce(self, tensors: list[Any], name: str, how: str) -> list[Any]:
        """Sum tensors over all ranks, in a graph.

        `how` is "each" (a call for each tensor), "grouped" (one call for all), or "gradients" (as
        the library's optimizer reduces gradients, which for Horovod is "each").
        """
        is_ours = self.name == "keras_ring"
        op = "sum" if is_ours else self.library.Sum
        if how == "grouped":
            return list(self.library.grouped_allreduce(tensors, op=op, name=name))
        if how == "gradients" and is_ours:
            from keras_ring.gradients import reduce_gradients
            from keras_ring.reduction import Reduction

            variables = [types.SimpleNamespace(path=f"{name}_{i}") for i in range(len(tensors))]
            return reduce_gradients(tensors, variables, Reduction(op), scope=name)
        return [
            self.library.allreduce(tensor, op=op, name=f"{name}_{i}")
            for i, tensor in enumerate(tensors)
        ]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.name == "keras_ring":
            self.library.barrier()
        elif self.name == "horovod":
            self.library.allreduce(np.zeros(1, np.float32), name="barrier")
        elif self.size > 1:
            self.comm.Barrier()

    def optimizer(self, optimizer: Any) -> Any:
        """Distribute an optimizer."""
        if self.name == "keras_ring":
            return self.library.DistributedOptimizer(optimizer)
        if self.name == "horovod":
            import horovod.tensorflow.keras

            return horovod.tensorflow.keras.DistributedOptimizer(optimizer)
        return optimizer


def best_seconds(run: Callable[[], Any], library: Library, repeats: int, rounds: int = 7) -> float:
    """Seconds of one call: the best round, since other work on a machine only ever adds time."""
    for _ in range(3):
        run()
    best = float("inf")
    for _ in range(rounds):
        library.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def allreduce(
    library: Library,
    num_tensors: int,
    num_elems: int,
    repeats: int,
    chain: int = 0,
    how: str = "each",
) -> float:
    """Time of summing `num_tensors` float32 tensors, all of them in one graph.

    With `chain` the tensors are made in the graph, as gradients are, and summed so many times one
    after the other; what the graph takes without that is subtracted. Otherwise they are arguments
    of the graph, and the time is that of the whole call.
    """
    if library.name == "mpi":
        from mpi4py import MPI

        # One call for all: what a program that fuses by hand would do.
        send = np.ones(num_tensors * num_elems, np.float32)
        receive = np.empty_like(send)
        return best_seconds(
            lambda: library.comm.Allreduce(send, receive, MPI.SUM), library, repeats
        )
    import tensorflow as tf

    def reduced(values: list[Any], step: int) -> list[Any]:
        return library.allreduce(values, f"bench_{num_elems}_{step}", how)

    if not chain:
        tensors = [tf.ones(num_elems) for _ in range(num_tensors)]
        call = tf.function(lambda values: reduced(values, 0))
        return best_seconds(lambda: call(tensors), library, repeats)

    def make(length: int) -> Callable[[], Any]:
        @tf.function
        def run(start: Any) -> Any:
            values = [tf.fill([num_elems], start + i) for i in range(num_tensors)]
            for step in range(length):
                values = reduced(values, step)
            return tf.add_n([value[0] for value in values])

        start = tf.constant(1.0)
        return lambda: run(start)

    without = best_seconds(make(0), library, repeats)
    return (best_seconds(make(chain), library, repeats) - without) / chain


def collective(library: Library, kind: str, num_elems: int, repeats: int) -> float:
    """Time of another collective on float32.

    `num_elems` is what a rank brings to alltoall, reducescatter and broadcast, and what it gets
    from allgather.
    """
    brought = num_elems // library.size if kind == "allgather" else num_elems
    if library.name == "mpi":
        send = np.ones(brought, np.float32)
        got = num_elems // library.size if kind == "reducescatter" else num_elems
        receive = np.ones(got, np.float32)
        calls = {
            "alltoall": lambda: library.comm.Alltoall(send, receive),
            "allgather": lambda: library.comm.Allgather(send, receive),
            "reducescatter": lambda: library.comm.Reduce_scatter_block(send, receive),
            "broadcast": lambda: library.comm.Bcast(send, 0),
        }
        return best_seconds(calls[kind], library, repeats)
    import tensorflow as tf

    arguments: dict[str, Any] = {"name": f"bench_{kind}_{num_elems}"}
    if kind == "broadcast":
        arguments["root_rank"] = 0
    if kind == "reducescatter":
        arguments["op"] = "sum" if library.name == "keras_ring" else library.library.Sum
    call = tf.function(lambda x: getattr(library.library, kind)(x, **arguments))
    tensor = tf.ones(brought)
    return best_seconds(lambda: call(tensor), library, repeats)


def eager(library: Library, kind: str, repeats: int) -> float:
    """Time of an eager collective whose size is another one each time."""
    import tensorflow as tf

    sizes = [library.size * (1 + i * 37 % 500) for i in range(repeats)]
    tensors = [tf.ones(size) for size in sizes]
    arguments = {"root_rank": 0} if kind == "broadcast" else {}
    call = getattr(library.library, kind)

    def run() -> None:
        for tensor in tensors:
            call(tensor, name=f"eager_{kind}", **arguments)

    return best_seconds(run, library, 1, rounds=3) / repeats


def copy(library: Library, num_bytes: int, repeats: int) -> float:
    """Time in which every rank copies its own memory, all at once."""
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    return best_seconds(lambda: np.copyto(target, source), library, repeats)


def build(model: str, keras: Any) -> tuple[Any, tuple[int, ...]]:
    """The two networks of the training benchmark, and the shape of an input."""
    layers = keras.layers
    if model == "mlp":
        net = [keras.Input((2048,))]
        net += [layers.Dense(2048, activation="relu") for _ in range(4)]
        return keras.Sequential([*net, layers.Dense(10)]), (2048,)
    net = [keras.Input((64, 64, 3))]
    for filters in (32, 64, 128, 128):
        for _ in range(2):
            net += [
                layers.Conv2D(filters, 3, padding="same"),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        net.append(layers.MaxPooling2D())
    return keras.Sequential([*net, layers.GlobalAveragePooling2D(), layers.Dense(10)]), (64, 64, 3)


def prepare(
    library: Library, model: str, *, is_compiled: bool = False, has_strategy: bool = False
) -> tuple[Any, tuple[Any, Any]]:
    """Compile a model with the library's optimizer, or in its strategy; and a batch of 32 a rank.

    A strategy gets the batches of all ranks and hands each rank its own.
    """
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(1)
    has_strategy = has_strategy and library.name == "keras_ring"
    scope = library.library.RingStrategy().scope() if has_strategy else contextlib.nullcontext()
    with scope:
        net, shape = build(model, keras)
        optimizer = keras.optimizers.SGD(1e-3)
        net.compile(
            optimizer if has_strategy else library.optimizer(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=is_compiled,
        )
    rng = np.random.default_rng(library.rank)
    rows = 32 * (library.size if has_strategy else 1)
    batch = (
        rng.normal(size=(rows, *shape)).astype(np.float32),
        rng.integers(0, 10, rows).astype(np.int32),
    )
    return net, batch


def train(
    library: Library, model: str, steps: int, is_compiled: bool = False, has_strategy: bool = False
) -> float:
    """Seconds of one training step (median), one compute thread a rank, batch 32 a rank."""
    import tensorflow as tf

    # Both pools: two operations side by side would take the core that another rank computes on, and
    # make one process alone look faster than one core is.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    net, batch = prepare(library, model, is_compiled=is_compiled, has_strategy=has_strategy)
    data = tf.data.Dataset.from_tensors(batch).repeat(steps)
    clock = step_clock(time.perf_counter)
    net.fit(data, epochs=1, verbose=0, callbacks=[clock])
    warm = len(clock.ends) // 4
    return float(np.median(np.diff(clock.ends)[warm:]))


def step_clock(now: Callable[[], float]) -> Any:
    """A callback whose `ends` tell when each step ended."""
    import tensorflow as tf

    class Clock(tf.keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.ends.append(now())

    return Clock()


def trace(library: Library, folder: str, steps: int) -> float:
    """Seconds of a training step of the MLP; writes what TensorFlow and keras_ring did in one.

    Rank 0 writes `operations.json`: begin and end of a step, and the operations in it.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    net, batch = prepare(library, "mlp")
    data = tf.data.Dataset.from_tensors(batch).repeat(steps)
    net.fit(data, verbose=0)
    if library.rank == 0:
        tf.profiler.experimental.start(folder)
    clock = step_clock(time.time)
    net.fit(data, verbose=0, callbacks=[clock])
    if library.rank == 0:
        tf.profiler.experimental.stop()
        step = clock.ends[-3:-1]
        record = {"step": step, "operations": operations_between(folder, *step)}
        (Path(folder) / "operations.json").write_text(json.dumps(record))
    return float(np.median(np.diff(clock.ends)))


def operations_between(folder: str, begin: float, end: float) -> list[tuple[str, float, float]]:
    """Kind, begin (seconds since 1970) and duration of TensorFlow's larger operations."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(next(Path(folder).rglob("*.xplane.pb")).read_bytes())
    # Times are relative to the profile's start, which stands in a plane of its own.
    start_ns = next(
        stat.uint64_value
        for plane in space.planes
        for stat in plane.stats
        if plane.stat_metadata[stat.metadata_id].name == "profile_start_time"
    )
    found = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                path, _, kind = name.partition(":")
                at = (start_ns + line.timestamp_ns + event.offset_ps / 1e3) / 1e9
                seconds = event.duration_ps / 1e12
                is_operation = kind.lstrip("_").isalnum() and " " not in path
                if is_operation and seconds > 5e-5 and begin <= at < end:
                    found.append((kind, at, seconds))
    return found


def feed(library: Library, **values: Any) -> float:
    """Seconds of reading an HDF5 file once."""
    import feeding

    return feeding.feed(library, best_seconds, **values)


WORK = {
    "allreduce": allreduce,
    "collective": collective,
    "eager": eager,
    "copy": copy,
    "feed": feed,
    "train": train,
    "trace": trace,
}


def main() -> None:
    """Run one work after the other; rank 0 prints the seconds of each."""
    library = Library(sys.argv[1])
    for name, (kind, values) in json.loads(sys.argv[2]).items():
        result = WORK[kind](library, **values)
        library.barrier()
        if library.rank == 0:
            print("BENCH " + json.dumps({name: result}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
