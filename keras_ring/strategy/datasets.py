"""This rank's part of a dataset.

tf.distribute's own way to cut batches makes batches of other sizes, and its ranks may end at
different steps. Here each rank takes its rows of each batch, so that all have as many steps, and
what they compute together is the very batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute as tf_data_distribute
from tensorflow.python.distribute import input_util

from keras_ring import collectives, runtime
from keras_ring.errors import ConfigError
from keras_ring.strategy.agreement import agree, gather

_SAME_DATA = (
    "fit, evaluate and predict are given the same data on every rank, of which each rank takes its "
    "rows. If every rank has its own part already, turn sharding off: options = "
    "tf.data.Options(); options.experimental_distribute.auto_shard_policy = "
    "tf.data.experimental.AutoShardPolicy.OFF; dataset = dataset.with_options(options)."
)
_numbers = itertools.count()


def distribute(dataset: Any, input_workers: Any, strategy: Any, options: Any) -> Any:
    """Return the `tf.distribute.DistributedDataset` of this rank's part of `dataset`."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    num_steps: int | None = None
    asks_ranks = False
    if runtime.size() > 1:
        if policy == policies.OFF:
            dataset, num_steps, asks_ranks = _in_step(dataset)
        elif policy == policies.FILE:
            dataset, num_steps, asks_ranks = _in_step(_own_files(dataset))
        else:
            num_steps = _check_same(dataset)
            dataset = dataset.map(_own_rows, num_parallel_calls=1, deterministic=True)
    options = _without_copies(options, input_workers, asks_ranks)
    result = input_util.get_distributed_dataset(dataset, input_workers, strategy, options=options)
    result.keras_ring_num_steps = num_steps
    return result


def from_function(
    dataset_fn: Callable[[Any], Any], input_workers: Any, strategy: Any, options: Any
) -> Any:
    """Return the `tf.distribute.DistributedDataset` of what `dataset_fn` gives this rank."""
    context = tf.distribute.InputContext(
        num_input_pipelines=runtime.size(),
        input_pipeline_id=runtime.rank(),
        num_replicas_in_sync=runtime.size(),
    )
    dataset = dataset_fn(context)
    num_steps: int | None = None
    asks_ranks = False
    if runtime.size() > 1:
        dataset, num_steps, asks_ranks = _in_step(dataset)
    options = _without_copies(options, input_workers, asks_ranks)
    result = input_util.get_distributed_datasets_from_function(
        lambda _: dataset, input_workers, [context], strategy, options=options
    )
    result.keras_ring_num_steps = num_steps
    return result


def _without_copies(options: Any, input_workers: Any, asks_ranks: bool) -> Any:
    """Return options by which batches are read as tf.data has them, where no GPU is to get them.

    tf.distribute would buffer them for one device as for many: a thread and four functions to
    trace for each iterator. A dataset that asks the other ranks must not be read ahead at all.
    """
    devices = input_workers.compute_devices_for_worker(0)
    if not asks_ranks and (options is not None or "CPU" not in devices[0]):
        return options
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )


def _check_same(dataset: Any) -> int | None:
    """Refuse datasets that cannot be the same on all ranks; return the number of batches."""
    num_batches = int(dataset.cardinality())
    is_sharded = _is_sharded(dataset)
    agree(
        "distributes a dataset",
        {
            "batches": num_batches,
            "spec": str(dataset.element_spec),
            "cut by Dataset.shard": is_sharded,
        },
        advice=_SAME_DATA,
    )
    if is_sharded:
        raise ConfigError(
            "RingStrategy: the dataset was cut by Dataset.shard already, and each rank would take "
            f"its rows of a part. {_SAME_DATA}"
        )
    return num_batches if num_batches >= 0 else None


def _is_sharded(dataset: Any) -> bool:
    pending = [dataset]
    while pending:
        part = pending.pop()
        if type(part).__name__ == "_ShardDataset":
            return True
        pending += part._inputs()
    return False


def _own_rows(*batch: Any) -> Any:
    """Return this rank's rows of a batch: as many as the others have, or one more."""
    parts = [part for part in tf.nest.flatten(batch) if _has_rows(part)]
    if not parts:
        raise ConfigError(
            "RingStrategy: the dataset has elements without rows; expected batches. Call "
            ".batch(batch_size) on it, with the size of the joint batch."
        )
    rank, size = runtime.rank(), runtime.size()
    known = parts[0].shape[0]
    num_rows = tf.shape(parts[0], tf.int64)[0] if known is None else known
    if isinstance(parts[0], tf.RaggedTensor):
        num_rows = parts[0].nrows() if known is None else known
    if known is not None and not isinstance(parts[0], tf.RaggedTensor):
        begin = rank * (known // size) + min(rank, known % size)
        end = begin + known // size + (rank < known % size)
    else:
        num_rows = tf.cast(num_rows, tf.int64)
        begin = rank * (num_rows // size) + tf.minimum(tf.cast(rank, tf.int64), num_rows % size)
        end = begin + num_rows // size + tf.cast(rank < num_rows % size, tf.int64)

    def own(part: Any) -> Any:
        if not _has_rows(part):
            return part
        if isinstance(part, tf.SparseTensor):
            start = tf.concat([[begin], tf.zeros_like(part.dense_shape[1:])], 0)
            shape = tf.concat([[end - begin], part.dense_shape[1:]], 0)
            return tf.sparse.slice(part, start, shape)
        return part[begin:end]

    own_batch = tf.nest.map_structure(own, batch)
    return own_batch if len(own_batch) > 1 else own_batch[0]


def _has_rows(part: Any) -> bool:
    is_tensor = isinstance(part, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
    return is_tensor and part.shape.rank != 0


def _own_files(dataset: Any) -> Any:
    """Return batches of this rank's files, together as large as the dataset's."""
    size = runtime.size()
    try:
        part = tf_data_distribute._AutoShardDataset(dataset, size, runtime.rank())
        problem = None
        next(iter(part.take(1)), None)
    except (tf.errors.OpError, ValueError) as error:
        problem = str(error).splitlines()[0][:500]
    problems = gather("distributes a dataset by files", problem)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise ConfigError(
            f"RingStrategy: the dataset cannot be shared by files (rank {failed[0]}: "
            f"{problems[failed[0]]}). It must read at least as many files as there are ranks "
            f"({size}); or set its auto_shard_policy to DATA."
        )
    return tf_data_distribute._LegacyRebatchDataset(part, size)


def _in_step(dataset: Any) -> tuple[Any, int | None, bool]:
    """Make the ranks' own datasets end together.

    A rank that has nothing left goes on with batches of no rows.

    Returns:
        The dataset; how many batches it has, if known; and whether it asks the other ranks for each
        batch if there is more to come.
    """
    counts = gather("distributes its own dataset", int(dataset.cardinality()))
    if all(count == tf.data.INFINITE_CARDINALITY for count in counts):
        return dataset, None, False
    if min(counts) >= 0:
        longest = max(counts)
        if min(counts) < longest:
            dataset = _with_empty_batches(dataset).take(longest)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(longest))
        return dataset, longest, False
    name = f"strategy/dataset {next(_numbers)}"

    def is_left(has_rows: Any, *_: Any) -> Any:
        flag = tf.cast(has_rows, tf.int32)
        return collectives.allreduce(flag, "max", name=f"{name}#end of data") > 0

    # Read ahead below, never above: a rank that asks whether data is left when its program does not
    # ask for a batch waits for ranks that read less far ahead. tf.data would put a prefetch at the
    # end, and run a last `map` in parallel, by itself.
    marked = _with_empty_batches(dataset, is_marked=True).prefetch(tf.data.AUTOTUNE)
    batches = marked.take_while(is_left).flat_map(
        lambda _, batch: tf.data.Dataset.from_tensors(batch)
    )
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return batches.with_options(options), None, True


def _with_empty_batches(dataset: Any, *, is_marked: bool = False) -> Any:
    """Return the dataset, and then batches of no rows for ever; marked: whether it has rows."""

    def empty(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise ConfigError(
                f"RingStrategy: the ranks' datasets may have different numbers of batches, and "
                f"there is no empty batch of {spec}. Give every rank as many batches, for example "
                "with .repeat() and steps_per_epoch."
            )
        return tf.zeros([0, *(d or 0 for d in spec.shape[1:])], spec.dtype)

    def without_rows(spec: Any) -> Any:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)

    spec = dataset.element_spec
    nothing = tf.nest.map_structure(empty, spec)
    open_spec = tf.nest.map_structure(without_rows, spec)

    def opened(*batch: Any) -> Any:
        parts = batch if isinstance(spec, tuple) else batch[0]
        return tf.nest.map_structure(
            lambda part, like: tf.ensure_shape(
                tf.compat.v1.placeholder_with_default(part, like.shape), like.shape
            ),
            parts,
            open_spec,
        )

    full = dataset.map(opened)
    rest = tf.data.Dataset.from_tensors(nothing).map(opened).repeat()
    if is_marked:
        full = full.map(_marker(spec, has_rows=True))
        rest = rest.map(_marker(spec, has_rows=False))
    return full.concatenate(rest)


def _marker(spec: Any, *, has_rows: bool) -> Callable[..., Any]:
    def mark(*batch: Any) -> Any:
        return tf.constant(has_rows), batch if isinstance(spec, tuple) else batch[0]

    return mark
