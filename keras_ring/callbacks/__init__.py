"""Keras callbacks for training on several ranks; each stands in the list on every rank."""

from keras_ring.callbacks.broadcast_initial_weights import BroadcastInitialWeights
from keras_ring.callbacks.checkpoint import Checkpoint
from keras_ring.callbacks.learning_rate_schedule import LearningRateSchedule
from keras_ring.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_ring.callbacks.metric_average import MetricAverage

__all__ = [
    "BroadcastInitialWeights",
    "Checkpoint",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "MetricAverage",
]
