"""What the ranks match a collective by, and what messages call it."""

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from keras_ring import graphs

# Between the labels of a group's tensors; tf_ops/engine/request.cc knows it too.
LABEL_SEPARATOR = "\n"


def call_name(name: str | None, kind: str) -> str:
    """Return the given name, or one that all ranks find at the same place of the same program."""
    if name is not None:
        return name
    if tf.executing_eagerly():
        return f"eager/{kind}#{kind}"
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    return f"{_place(graph)}/{_count(graph, kind)}#{scope}{'/' if scope else ''}{kind}"


# TensorFlow's names of nodes, branches and bodies count what the process has built so far, and
# Keras's names of layers too, so that they differ where a rank has built more than the others. What
# a graph itself holds is counted anew in each trace.
_counters: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
_inner_places: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _count(graph: Any, kind: str) -> str:
    counter = _counters.setdefault(graph, Counter())
    counter[kind] += 1
    return f"{kind}{counter[kind]}"


def _place(graph: Any) -> str:
    """Return the function that a graph belongs to, and where in it."""
    if not graphs.is_inner(graph):
        return str(getattr(graph, "name", "graph"))
    if graph not in _inner_places:
        _inner_places[graph] = f"{_place(graph.outer_graph)}/{_count(graph.outer_graph, 'inner')}"
    return _inner_places[graph]


def label_of(name: str) -> str:
    """Return the part of a name that messages show; of a group, its first tensor's label."""
    first, *others = (name.partition("#")[2] or name).split(LABEL_SEPARATOR)
    return f"{first} and {len(others)} more" if others else first
