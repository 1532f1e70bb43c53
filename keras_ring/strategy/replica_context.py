"""The replica that runs on this rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class RingReplicaContext(tf.distribute.ReplicaContext):
    """The context in which `RingStrategy.run` calls a function: replica number `rank()`."""

    def __init__(self, strategy: Any, rank: int) -> None:
        super().__init__(strategy, replica_id_in_sync_group=rank)

    @property
    def devices(self) -> tuple[str, ...]:
        """The one device of this rank."""
        return self._strategy.extended.worker_devices  # type: ignore[no-any-return]
