"""What a strategy must be able to do, for tf.distribute: its `extended` half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, values
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from keras_ring import joint_step, runtime
from keras_ring.joint_step import Replica
from keras_ring.strategy import collectives, datasets, variables
from keras_ring.strategy.replica_context import RingReplicaContext


class RingExtended(OneDeviceExtended):
    """One device on each rank, and what is reduced or gathered goes over all ranks.

    Methods with a leading underscore are tf.distribute's names; `tf.distribute.StrategyExtended`
    documents them.
    """

    def __init__(self, strategy: Any, device: str) -> None:
        super().__init__(strategy, device)
        self.experimental_enable_get_next_as_optional = True

    # Who takes part.

    @property
    def _num_replicas_in_sync(self) -> int:
        replica = joint_step.current()
        # In a step of Keras's, code is written as for one process and gradients are averaged:
        # what divides losses by this number (Keras's, compute_average_loss) must find 1.
        return 1 if replica is not None and not replica.is_sum else runtime.size()

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:  # noqa: ARG002
        return 0

    def _in_multi_worker_mode(self) -> bool:
        # True would make tf.distribute exchange, in each step and in the graph, whether all
        # ranks have data left; datasets.py sees to that.
        return False

    def _use_merge_call(self) -> bool:
        return False

    @property
    def _num_gpus_per_worker(self) -> int:
        return 0

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one that writes checkpoints."""
        return runtime.rank() == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one that writes summaries."""
        return runtime.rank() == 0

    @property
    def _support_per_replica_values(self) -> bool:
        return True

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica of this process."""
        return [[self._device]]

    # Running.

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        replica = Replica(is_sum=True, size=runtime.size())
        context = RingReplicaContext(self._container_strategy(), runtime.rank())
        with tf.device(self._device), context, replica:
            return fn(
                *distribute_utils.select_replica(0, args),
                **distribute_utils.select_replica(0, kwargs),
            )

    def _update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        if isinstance(var, values.DistributedVariable):
            var = var._get_replica(0)
        args = [collectives.local_value(arg) for arg in args]
        with tf.device(self._device), distribute_lib.UpdateContext(0):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(lambda part: (part,), result)

    def _replica_ctx_update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        if isinstance(var, values.DistributedVariable):
            var = var._get_replica(0)
        with tf.device(self._device):
            result = fn(var, *args, **(kwargs or {}))
        return result if group else tf.nest.map_structure(lambda part: (part,), result)

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None:
            return super()._create_variable(next_creator, **kwargs)
        kwargs.pop("colocate_with", None)
        return variables.create(self._container_strategy(), self._device, next_creator, kwargs)

    def read_var(self, replica_local_var: Any) -> Any:
        """Return a variable's value: over all ranks, if it is one that is added up when read."""
        if isinstance(replica_local_var, values.SyncOnReadVariable):
            return replica_local_var._get_cross_replica()
        return tf.identity(collectives.local_value(replica_local_var))

    # Reducing and gathering.

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        return self._reduce_nest(reduce_op, value)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:  # noqa: ARG002
        return self._reduce_nest(reduce_op, value)

    def _batch_reduce_to(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any,  # noqa: ARG002
    ) -> list[Any]:
        local = [collectives.local_value(value) for value, _ in value_destination_pairs]
        return collectives.reduce_all(reduce_op, local)

    def _reduce_nest(self, reduce_op: Any, value: Any) -> Any:
        flat = [collectives.local_value(part) for part in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, collectives.reduce_all(reduce_op, flat))

    def _gather_to_implementation(
        self,
        value: Any,
        destinations: Any,  # noqa: ARG002
        axis: int,
        options: Any,  # noqa: ARG002
    ) -> Any:
        return tf.nest.map_structure(
            lambda part: collectives.gather_all(collectives.local_value(part), axis), value
        )

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, tf.distribute.DistributedValues):
            return tuple(value._values)
        return (value,)

    # Data.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        workers = self._input_workers_with_options(options)
        return datasets.distribute(dataset, workers, self._container_strategy(), options)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any
    ) -> Any:
        workers = self._input_workers_with_options(options)
        return datasets.from_function(dataset_fn, workers, self._container_strategy(), options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(runtime.rank(), runtime.size()))
