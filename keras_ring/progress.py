"""Follow each call of fit from `init` on, and let rank 0 alone show the progress.

The bar and the lines "Epoch 1/5" come from one callback of Keras, ProgbarLogger, which asks its
`verbose` for both. Nothing but that is changed: other callbacks, and the user's own prints, write
as they are told.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_ring import fitting, runtime

_MARK = "_keras_ring_patched"


def silence_other_ranks() -> None:
    """Make ProgbarLogger silent on all ranks but 0, while keras_ring is initialized."""
    cls = keras.callbacks.ProgbarLogger
    if getattr(cls.set_params, _MARK, False):
        return
    plain_set_params = cls.set_params

    @functools.wraps(plain_set_params)
    def set_params(self: Any, params: Any) -> None:
        plain_set_params(self, params)
        if runtime.is_initialized() and runtime.rank() != 0:
            self.verbose = 0

    setattr(set_params, _MARK, True)
    cls.set_params = set_params


def follow_fit() -> None:
    """Hook `fit` before a script calls it: a callback that is made in its arguments is too late."""
    if keras.backend.backend() == "tensorflow":
        fitting.patch()


runtime.on_init(silence_other_ranks)
runtime.on_init(follow_fit)
