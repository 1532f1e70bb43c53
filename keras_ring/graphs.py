"""Which function a graph of TensorFlow's belongs to."""

from typing import Any

_INNER_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def is_inner(graph: Any) -> bool:
    """Return whether `graph` is a branch of a cond or a part of a loop, not a whole function."""
    # Those of gradients are subclasses.
    return any(cls.__name__ in _INNER_GRAPHS for cls in type(graph).__mro__)


def function_graph(graph: Any) -> Any:
    """Return the graph of the whole function that `graph` is run within."""
    while is_inner(graph):
        graph = graph.outer_graph
    return graph
