"""Hooks for what Keras does around an optimizer: methods of LossScaleOptimizer, and pickling.

`compile` puts a LossScaleOptimizer around the user's optimizer by itself, and a model pickles its
optimizer by its config, so neither can be reached from the optimizer object. Both hooks do nothing
for an optimizer that is not distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ring import joint_step
from keras_ring.errors import ConfigError
from keras_ring.reducer import Reducer, accumulates, already_reduced, reducer_of, weigh_loss

_MARK = "_keras_ring_patched"


def patch_loss_scaling(adopt: Callable[[Any], None]) -> None:
    """Make all ranks decide together whether a step under loss scaling is applied.

    Keras asks "are all gradients finite" of the rank's own gradients. One rank that overflows would
    skip a step that the others apply, and they would wait for its gradients for ever.

    Without accumulation the gradients are reduced first, each as soon as backprop has it, and Keras
    checks the results: an inf or NaN survives a sum, and the results have equal bits on all ranks,
    so the decision is common with no exchange of its own. With accumulation there is nothing to
    reduce yet: the ranks agree on the answer.

    Args:
        adopt: Called with an optimizer that is applied within a strategy and is not distributed.
    """
    cls = keras.optimizers.LossScaleOptimizer
    if getattr(cls.apply, _MARK, False):
        return
    if not callable(getattr(cls, "check_finite", None)):
        raise ConfigError(
            f"Keras {keras.__version__} has no LossScaleOptimizer.check_finite, which keras_ring "
            "hooks so that all ranks skip a step together. Install a version of Keras from 3.0.5 "
            "to 3.15."
        )
    plain_apply, plain_check_finite, plain_scale = cls.apply, cls.check_finite, cls.scale_loss

    @functools.wraps(plain_apply)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if reducer_of(inner) is None and joint_step.current() is not None:
            adopt(inner)
        reducer = reducer_of(inner)
        if reducer is None or len(grads) == 0:
            return plain_apply(self, grads, trainable_variables)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                # A MultiOptimizer knows its inner optimizers only when it is built.
                self.build(trainable_variables)
        grads = reducer.weigh(grads)
        if accumulates(inner):
            with already_reduced(inner, is_only_weighed=True):
                return plain_apply(self, grads, trainable_variables)
        variables = trainable_variables or self._trainable_variables
        reduced = reducer.reduce(grads, variables)
        with already_reduced(inner):
            return plain_apply(self, reduced, trainable_variables)

    @functools.wraps(plain_check_finite)
    def check_finite(self: Any, grads: Any) -> tf.Tensor:
        finite = plain_check_finite(self, grads)
        reducer = reducer_of(self.inner_optimizer)
        # Only gradients that are accumulated come here unreduced.
        if reducer is None or not accumulates(self.inner_optimizer):
            return finite
        return reducer.agree(finite)

    @functools.wraps(plain_scale)
    def scale_loss(self: Any, loss: Any) -> Any:
        return plain_scale(self, weigh_loss(self, loss))

    setattr(apply, _MARK, True)
    cls.apply = apply
    cls.check_finite = check_finite
    cls.scale_loss = scale_loss


def patch_pickling(rebuild: Callable[[Reducer, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
    """Make copies, pickled or deep, of models and optimizers as distributed as the originals.

    Keras copies both by way of its file format, which knows the plain optimizer only: the copy
    would train on, each rank by itself, and nobody would be told.

    Args:
        rebuild: Called when a copy is made, with the original's reducer, Keras's function and its
            arguments.
    """
    owner = next(cls for cls in keras.Model.__mro__ if "__reduce__" in vars(cls))
    # Before Keras 3.5 a model is copied attribute by attribute, hooks included.
    if owner is object or getattr(owner.__reduce__, _MARK, False):
        return
    plain_reduce = owner.__reduce__

    @functools.wraps(plain_reduce)
    def reduce(self: Any) -> tuple[Any, ...]:
        function, arguments = plain_reduce(self)
        reducer = reducer_of(self) or reducer_of(getattr(self, "optimizer", None))
        # What a strategy has made distributed is its own; a copy made in its scope will be, too.
        if reducer is None or reducer.is_adopted:
            return function, arguments
        return rebuild, (reducer, function, arguments)

    setattr(reduce, _MARK, True)
    owner.__reduce__ = reduce
