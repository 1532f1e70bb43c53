"""How a method of Keras is hooked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_HOOKS = "_keras_ring_hooks"


def hooked(plain: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `hook` with `plain` before its arguments."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(plain, *args, **kwargs)

    setattr(call, _HOOKS, (*getattr(plain, _HOOKS, ()), hook))
    return call


def is_hooked(function: Any, hook: Callable[..., Any]) -> bool:
    """Return whether `hook` was put around a function."""
    return hook in getattr(function, _HOOKS, ())


def hook_method(cls: Any, name: str, hook: Callable[..., Any]) -> None:
    """Put `hook` around a method, once; do nothing if this version of Keras has none of the name.

    Args:
        cls: The class, or one that inherits the method.
        name: The method's.
        hook: Called with the plain method before its arguments.
    """
    plain = getattr(cls, name, None)
    if plain is not None and not is_hooked(plain, hook):
        setattr(cls, name, hooked(plain, hook))
