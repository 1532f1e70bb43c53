"""What runs before and around training: the build of the C++ part and the command line.

Nothing here imports TensorFlow, so `keras-ring --help` answers at once.
"""
