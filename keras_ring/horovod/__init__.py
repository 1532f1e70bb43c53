"""The names of Horovod 0.28 over keras_ring, for scripts that move from it.

Replace `horovod` by `keras_ring.horovod` in the imports of a script:

    import keras_ring.horovod.tensorflow as hvd
    import keras_ring.horovod.tensorflow.keras as hvd
    import keras_ring.horovod.keras as hvd

Names, signatures and defaults are Horovod's; the work is done by `keras_ring`. What differs is in
docs/from-horovod.md.
"""
