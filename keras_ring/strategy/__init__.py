"""`RingStrategy`: a `tf.distribute.Strategy` of one replica a rank.

agreement       what all ranks must be told, or must agree on, before they go on together
collectives     what tf.distribute asks to be reduced or gathered, as collectives of keras_ring
replica_context the replica that runs on this rank
variables       how variables are made: equal at the start, summed when read, kept equal
datasets        this rank's part of a dataset
extended        what a strategy must be able to do, for tf.distribute
fit_step        one step of a Keras model, as part of the step of all ranks
keras_fit       what Keras does around its steps; fitting is what it does between them
ring_strategy   the class that users see
"""

from keras_ring.strategy.ring_strategy import RingStrategy

__all__ = ["RingStrategy"]
