"""Horovod's elastic training, which keras_ring does not have yet."""

from __future__ import annotations

from typing import Any, NoReturn

_NAMES = (
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
)
__all__ = list(_NAMES)


def _refusal(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"elastic.{name}: keras_ring does not train elastically yet. Save checkpoints, and "
            "start the job again with the hosts that are left."
        )

    refuse.__name__ = name
    return refuse


def __getattr__(name: str) -> Any:
    """Every name of the module raises when it is called."""
    if name in _NAMES:
        return _refusal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
