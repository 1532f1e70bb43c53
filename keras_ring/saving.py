"""Load a model so that it goes on training on all ranks."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from keras_ring.compression import Compression
from keras_ring.optimizer import DistributedOptimizer
from keras_ring.reduction import Op

__all__ = ["load_model"]


def load_model(
    filepath: Any, *, op: Op = "mean", compression: Compression | None = None, **kwargs: Any
) -> Any:
    """Load a model with `keras.saving.load_model` and distribute its optimizer.

    A file knows the plain optimizer only, whichever saved it. The optimizer that was loaded is
    distributed in place: its state, such as moments and the number of steps taken, is that of the
    file. A model that was saved without an optimizer comes back as Keras loads it.

    Args:
        filepath: A `.keras` or `.h5` file, as `keras.saving.load_model` takes it. Each rank reads
            it.
        op: As in `DistributedOptimizer`. Defaults to `"mean"`.
        compression: As in `DistributedOptimizer`. Defaults to None.
        **kwargs: For `keras.saving.load_model`.

    Returns:
        The model, compiled as it was saved.

    Raises:
        ConfigError: `op` or `compression` is unknown.

    Example:
        model = keras_ring.load_model("digits.keras")
        model.fit(x, y, callbacks=[keras_ring.callbacks.BroadcastInitialWeights()])
    """
    model = keras.saving.load_model(filepath, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        if str(filepath).endswith((".h5", ".hdf5")):
            _complete_optimizer(model, Path(filepath))
        DistributedOptimizer(model.optimizer, op=op, compression=compression)
    return model


def _complete_optimizer(model: Any, path: Path) -> None:
    """Give the optimizer of a .h5 file its variables and their state.

    Keras builds it for `model._trainable_variables`, which is empty: without this the state of the
    file is lost, and the first step fails with "Unknown variable".
    """
    variables = model.trainable_variables
    if not variables or model.optimizer._trainable_variables:
        return
    _rebuild(model.optimizer, variables)
    with h5py.File(path) as file:
        if "optimizer_weights" not in file:
            return
        group = file["optimizer_weights"]
        values = [np.asarray(group[name]) for name in _names(group)]
    targets = model.optimizer.variables
    if [v.shape for v in values] != [tuple(v.shape) for v in targets]:
        warnings.warn(
            f"load_model: the optimizer state in {path} does not fit {model.optimizer.name!r}: it "
            f"has {len(values)} variables, expected {len(targets)} of the model's shapes. The "
            "optimizer starts afresh. Save the model as a .keras file.",
            stacklevel=3,
        )
        return
    for target, value in zip(targets, values, strict=True):
        target.assign(value)


def _rebuild(optimizer: Any, variables: list[Any]) -> None:
    """Build an optimizer that was built for no variables."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It has its own two variables already, and would create them again. Past __setattr__, which
        # would take the model's variables for its own.
        vars(optimizer)["_trainable_variables"] = list(variables)
        optimizer = optimizer.inner_optimizer
    optimizer.built = False
    optimizer.build(variables)


def _names(group: Any) -> list[str]:
    """The names of the state's arrays in order; Keras cuts long lists into numbered attributes."""
    numbered = (f"weight_names{i}" for i in itertools.count())
    keys = ["weight_names", *itertools.takewhile(group.attrs.__contains__, numbered)]
    names = [name for key in keys for name in group.attrs.get(key, ())]
    return [name.decode() if isinstance(name, bytes) else name for name in names]
