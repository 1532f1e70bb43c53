"""The strategy that users see."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_ring import fitting, runtime
from keras_ring.errors import ConfigError
from keras_ring.optimizer_hooks import adopt_when_applied
from keras_ring.strategy import fit_step, keras_fit
from keras_ring.strategy.agreement import gather
from keras_ring.strategy.extended import RingExtended

_OLDEST_KERAS = (3, 10)


class RingStrategy(tf.distribute.Strategy):
    """Train a Keras model on all ranks as one process would on the whole data.

    A model that is built and compiled in its `scope()` is trained, evaluated and used by all ranks
    together: `fit`, `evaluate` and `predict` take the same arguments on every rank, the batch
    size is that of the joint batch, and each rank computes its own rows of each batch. Weights,
    logs, metrics and predictions are those of one process, and the same on all ranks.

    - Every rank is given the whole data and takes its rows of each batch. With the auto-shard
      policy OFF, or with `distribute_datasets_from_function`, a rank's batches are its own part
      already. With FILE, each rank reads some of the files.
    - Losses are averaged over the joint batch, also where a rank has fewer rows than the others or
      none, and those of reduction "sum" are added up. Write a loss of your own, in a `train_step`
      too, as for one process: as the mean over the rows that it is given.
    - A variable made in the scope begins with rank 0's value. A metric is added up over the ranks.
      The moving statistics of BatchNormalization are averaged after each step; one process would
      see the variance of the joint batch, which `synchronized=True` gives.
    - Dropout drops other units on each rank, by a seed that depends on the rank.
    - `train_on_batch` and `test_on_batch` are given each rank's own part of the batch.
      `predict_on_batch` returns this rank's rows.
    - Callbacks of Keras that write (ModelCheckpoint, BackupAndRestore, TensorBoard, CSVLogger)
      write on rank 0. If one rank's callback stops training, all ranks stop.
    - In a loop of your own, `run`, `reduce`, `gather` and the rest are tf.distribute's: there the
      loss is divided by `num_replicas_in_sync`, as Keras's losses are, and gradients add up.

    Args:
        device: The device of this rank. Defaults to the first GPU that TensorFlow sees, or else the
            CPU.

    Raises:
        ConfigError: `keras_ring.init` was not called, Keras is older than 3.10 or runs on another
            backend than TensorFlow.

    Collective: every rank makes one, and runs the same program within its scope. Saving a model
    needs one rank only.

    Example:
        keras_ring.init()
        with keras_ring.RingStrategy().scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)
    """

    # For those who may not import this class: reducer.py.
    is_keras_ring = True

    def __init__(self, device: str | None = None) -> None:
        size = runtime.size()
        if keras.backend.backend() != "tensorflow":
            raise ConfigError(
                "RingStrategy needs Keras on TensorFlow, and Keras runs on "
                f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is "
                "imported."
            )
        if tuple(int(part) for part in keras.__version__.split(".")[:2]) < _OLDEST_KERAS:
            raise ConfigError(
                f"RingStrategy needs Keras 3.10 or later; this is {keras.__version__}. Upgrade "
                "Keras, or use keras_ring.DistributedOptimizer."
            )
        if device is None:
            device = "/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0"
        super().__init__(RingExtended(self, device))
        if size > 1:
            _share_seed()
        adopt_when_applied()
        keras_fit.patch()
        fitting.patch()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` on every rank, each as the replica of its number.

        Args:
            fn: A function, or a model's `train_step` or `test_step`.
            args: Its positional arguments; of values distributed by this strategy, this rank's.
            kwargs: Its keyword arguments, likewise.
            options: As `tf.distribute.Strategy.run`.

        Returns:
            What `fn` returned on this rank.

        Collective: every rank calls it, if `fn` reduces or applies gradients.
        """
        model = fit_step.model_of(fn)
        if model is not None:
            fn = fit_step.as_joint_step(fn, model)
        return super().run(fn, args=tuple(args), kwargs=kwargs, options=options)


def _share_seed() -> None:
    """Give TensorFlow the same seed on all ranks, unless the user has set one on all of them.

    Ranks that shuffle the same data differently would not take different rows of the same batch.
    """
    from tensorflow.python.eager import context

    # Not from Python's random numbers: the user's own draws stay what they were.
    own = context.global_seed()
    seeds = gather("makes a RingStrategy", (own, secrets.randbits(31)))
    if any(seed != own for seed, _ in seeds) or own is None:
        first, drawn = seeds[0]
        tf.random.set_seed(drawn if first is None else first)
