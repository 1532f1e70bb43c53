"""Horovod's numbers for operations, and what keras_ring calls them."""

from __future__ import annotations

from typing import Any

from keras_ring.errors import ConfigError

Average, Sum, Adasum, Min, Max, Product = range(6)

_NAMES = {
    Average: "mean",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}


def name_of(op: Any) -> Any:
    """Return keras_ring's name of an operation, which may be given as such."""
    name = _NAMES.get(op, op)
    if name not in _NAMES.values():
        raise ConfigError(f"op is {op!r}; expected Average, Sum, Adasum, Min, Max or Product.")
    return name
