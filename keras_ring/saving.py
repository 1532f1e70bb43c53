"""Load a model so that it goes on training on all ranks."""

from __future__ import annotations

from typing import Any

import keras

from keras_ring.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(filepath: Any, *, op: str = "mean", **kwargs: Any) -> Any:
    """Load a model with `keras.saving.load_model` and distribute its optimizer.

    A file knows the plain optimizer only, whichever saved it. The optimizer that was loaded is
    distributed in place: its state, such as moments and the number of steps taken, is that of the
    file. A model that was saved without an optimizer comes back as Keras loads it.

    Args:
        filepath: A `.keras` or `.h5` file, as `keras.saving.load_model` takes it. Each rank reads
            it.
        op: As in `DistributedOptimizer`. Defaults to `"mean"`.
        **kwargs: For `keras.saving.load_model`.

    Returns:
        The model, compiled as it was saved.

    Raises:
        ConfigError: `op` is unknown.

    Example:
        model = keras_ring.load_model("digits.keras")
        model.fit(x, y, callbacks=[keras_ring.callbacks.BroadcastInitialWeights()])
    """
    model = keras.saving.load_model(filepath, **kwargs)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, op=op)
    return model
