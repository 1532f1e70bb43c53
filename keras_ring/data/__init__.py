"""Each rank's part of the training data: `shard`, and `HDF5` for what does not fit in memory.

order       which samples are whose, and when: arithmetic
arrays      batches of arrays in memory
datasets    batches of a tf.data.Dataset
py_dataset  what a rank reads batches from, and batches of a keras.utils.PyDataset
hdf5        batches of HDF5 files
memory      memory for batches
prefetch    reading ahead, beside training
sharding    the function that users call
"""

from keras_ring.data.hdf5 import HDF5
from keras_ring.data.sharding import shard

__all__ = ["HDF5", "shard"]
