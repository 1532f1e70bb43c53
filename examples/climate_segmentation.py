"""Find storms in weather fields, pixel by pixel, each rank reading its own part of an HDF5 file.

mpirun -np 2 python examples/climate_segmentation.py
"""

import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
from keras import layers

import keras_ring as kr

SIDE, NUM_FIELDS, NUM_TESTED = 32, 768, 96

kr.init()
keras.utils.set_random_seed(0)
keras.mixed_precision.set_global_policy("mixed_bfloat16")


def weather(rng, number):
    """Pressure and two winds on a grid, (number, SIDE, SIDE, 3), and where a storm is."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    fields = rng.normal(0, 0.3, (number, SIDE, SIDE, 3))
    storms = np.zeros((number, SIDE, SIDE, 1))
    for field, storm in zip(fields, storms, strict=True):
        for _ in range(rng.integers(1, 4)):
            down, right = rows - rng.integers(4, SIDE - 4), columns - rng.integers(4, SIDE - 4)
            radius = rng.uniform(2.5, 5)
            depth = np.exp(-(down**2 + right**2) / radius**2)
            # Low pressure, and the wind around it.
            field += depth[..., None] * np.stack([-3 + 0 * down, -down, right], axis=-1)
            storm[depth > 0.4] = 1
    return fields.astype("float32"), storms.astype("uint8")


def block(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))


def u_net():
    inputs = keras.Input((SIDE, SIDE, 3))
    fine = block(inputs, 12)
    middle = block(layers.MaxPooling2D()(fine), 24)
    coarse = block(layers.MaxPooling2D()(middle), 48)
    up = block(layers.Concatenate()([layers.UpSampling2D()(coarse), middle]), 24)
    up = block(layers.Concatenate()([layers.UpSampling2D()(up), fine]), 12)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid", dtype="float32")(up))


folder = Path(kr.broadcast_object(tempfile.mkdtemp() if kr.rank() == 0 else None))
path = folder / "weather.h5"
if kr.rank() == 0:
    fields, storms = weather(np.random.default_rng(1), NUM_FIELDS)
    with h5py.File(path, "w") as file:
        file.create_dataset("fields", data=fields, chunks=(16, SIDE, SIDE, 3), compression="lzf")
        file.create_dataset("storms", data=storms, chunks=(16, SIDE, SIDE, 1), compression="lzf")
kr.barrier()

with kr.RingStrategy().scope():
    model = u_net()
    model.compile(
        keras.optimizers.Adam(5e-3),
        "binary_crossentropy",
        metrics=[keras.metrics.BinaryIoU(target_class_ids=[1], name="iou")],
    )

data = kr.data.HDF5(path, x="fields", y="storms")
train = kr.data.shard(data, reading="partition", batch_size=16 * kr.size())
model.fit(train, epochs=6)

fields, storms = weather(np.random.default_rng(2), NUM_TESTED)  # the same on every rank
results = model.evaluate(fields, storms, batch_size=16 * kr.size(), verbose=0, return_dict=True)
if kr.rank() == 0:
    path.unlink()
    folder.rmdir()
    print(f"storms found: IoU {results['iou']:.3f}")
