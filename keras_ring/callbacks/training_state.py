"""What a checkpoint keeps of a training beside its place in the data, and how it is given back.

Of a model's weights and its optimizers' variables all ranks have the same, and the root's are kept.
Each rank's own are the state of its random numbers, and its metrics in the midst of an epoch.
"""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from keras_ring.callbacks.checkpoint_file import Array
from keras_ring.collectives import allreduce
from keras_ring.errors import ConfigError
from keras_ring.fitting import fits
from keras_ring.fitting.agreement import Group
from keras_ring.reducer import gradient_accumulators
from keras_ring.reduction import identity
from keras_ring.variables import broadcast_variables

# As keras.src.random.seed_generator calls it.
_GLOBAL_SEED = "global_seed_generator"


def build_optimizers(model: Any) -> None:
    """Make the optimizer's variables, as its first step would."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def common_variables(model: Any) -> list[Any]:
    """Return the variables of which all ranks have the same values."""
    every = [*model.weights, *(v for o in fits.optimizers_of(model) for v in o.variables)]
    found = {identity(v): v for v in every}
    return [v for v in found.values() if keras.backend.standardize_dtype(v.dtype) != "string"]


def specs_of(variables: list[Any]) -> list[list[Any]]:
    """Return path, shape and dtype of each, as JSON gives them back."""
    return [
        [v.path, list(map(int, v.shape)), keras.backend.standardize_dtype(v.dtype)]
        for v in variables
    ]


def common_values(model: Any, group: Group | None) -> list[Array]:
    """Return the values of `common_variables`.

    What ranks have accumulated for their next step is the mean over them, so that the step is the
    same on any number of ranks.

    Collective: every rank of the group calls it, if gradients are accumulated.
    """
    values = {identity(v): value_of(v) for v in common_variables(model)}
    if group is not None and group.size > 1:
        for i, optimizer in enumerate(fits.optimizers_of(model)):
            for j, variable in enumerate(gradient_accumulators(optimizer)):
                mean = allreduce(
                    tf.convert_to_tensor(values[identity(variable)]),
                    "mean",
                    name=f"fit/checkpoint#accumulated gradient {i}.{j}",
                    process_set=group.process_set,
                )
                values[identity(variable)] = mean.numpy()
    return list(values.values())


def check_fits(path: Any, specs: list[list[Any]], variables: list[Any]) -> None:
    """Raise for the first variable that a file has otherwise than the model."""
    remedy = (
        "Build and compile the model as it was when the file was written, or give Checkpoint "
        "another path."
    )
    for i, (its, own) in enumerate(zip(specs, specs_of(variables), strict=False)):
        if its[1:] != own[1:]:
            raise ConfigError(
                f"Checkpoint: variable {i} of model and optimizer, {own[0]!r}, is {own[2]} of "
                f"shape {tuple(own[1])}, and {path} has {its[0]!r}, {its[2]} of shape "
                f"{tuple(its[1])}. {remedy}"
            )
    if len(specs) != len(variables):
        raise ConfigError(
            f"Checkpoint: model and optimizer have {len(variables)} variables, and {path} has "
            f"{len(specs)}. {remedy}"
        )


def give_common(model: Any, group: Group | None, values: list[Array] | None) -> None:
    """Give all ranks the values that the root has; None on the others.

    Collective: every rank of the group calls it.
    """
    variables = common_variables(model)
    for variable, value in zip(variables, values or [], strict=False):
        variable.assign(value)
    if group is not None and group.size > 1:
        broadcast_variables(
            variables, group.root, name="fit/checkpoint", process_set=group.process_set
        )


def random_state(model: Any) -> dict[str, Any]:
    """Return the state of this rank's random numbers: Python's, NumPy's and Keras's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), position, has_gauss, gauss],
        "seeds": [value_of(v).tolist() for v in _seeds(model)],
        "global_seed": [value_of(v).tolist() for v in _global_seed()],
    }


def give_seeds(model: Any, state: dict[str, Any]) -> None:
    """Let Keras go on drawing from where it was."""
    for name, variables in (("seeds", _seeds(model)), ("global_seed", _global_seed())):
        if len(state[name]) == len(variables):
            for variable, value in zip(variables, state[name], strict=True):
                variable.assign(np.asarray(value, keras.backend.standardize_dtype(variable.dtype)))


def give_random_state(state: dict[str, Any]) -> None:
    """Let Python and NumPy go on drawing from where they were."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, numpy_gauss))


def metric_values(model: Any) -> list[Array]:
    """Return what metrics have added up; in a RingStrategy's scope over all ranks.

    Collective: in a scope every rank calls it.
    """
    return [value_of(v) for v in model.metrics_variables]


def add_to_metrics(model: Any, values: list[Array]) -> None:
    """Let metrics go on from what they had added up.

    Args:
        model: Which has trained a batch since, because metrics have no variables before.
        values: As of `metric_values`.

    Collective: in a scope every rank calls it.
    """
    variables = list(model.metrics_variables)
    if [v.shape for v in values] != [tuple(v.shape) for v in variables]:
        return
    for variable, value in zip(variables, values, strict=True):
        variable.assign((value_of(variable) + value).astype(value.dtype))


def value_of(variable: Any) -> Array:
    """Return a variable's value, not its memory."""
    return np.array(keras.ops.convert_to_tensor(variable).numpy())


def _seeds(model: Any) -> list[Any]:
    others = {identity(v) for v in (*model.weights, *model.metrics_variables)}
    found = {identity(v): v for v in model.variables if identity(v) not in others}
    return list(found.values())


def _global_seed() -> list[Any]:
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    return [] if generator is None else [generator.state]
