"""Training by `fit` that all ranks do together, whichever way they reduce gradients.

A model in a RingStrategy's scope and one that is compiled with a distributed optimizer are trained
by the same `fit`, and what is true of the one is true of the other: no rank waits for one that has
stopped, and files that are named alike are written once.

hooks       how a method of Keras is hooked
agreement   what the ranks tell one another between the steps
fits        the call of fit that is going on
steps       how many steps an epoch has, on all ranks alike
callbacks   when callbacks stop training or change the learning rate
monitors    callbacks that watch a metric
writers     callbacks that write files
"""

from __future__ import annotations

from keras_ring.fitting import callbacks, fits, monitors, steps, writers


def patch() -> None:
    """Hook `fit`, its data and its callbacks, once.

    Nothing changes for a model that no other rank trains.
    """
    fits.patch()
    steps.patch()
    callbacks.patch()
    monitors.patch()
    writers.patch()
