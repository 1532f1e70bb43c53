"""See keras_ring.horovod.elastic."""

from keras_ring.horovod.elastic import __getattr__ as __getattr__
