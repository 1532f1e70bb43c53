"""The compatible modules: Horovod's names and signatures, and what they do on several ranks."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
import keras_ring.horovod.keras as hvd_keras
import keras_ring.horovod.tensorflow as hvd
import keras_ring.horovod.tensorflow.keras as hvd_tf_keras
from keras_ring.horovod.common.exceptions import HorovodInternalError

TENSOR_OPTIONS = "device_dense='', device_sparse='', compression=none"
SET = "process_set=gps"
GRADIENTS = "op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None"
TAPE = f"gradtape, {TENSOR_OPTIONS}, sparse_as_dense=False, {GRADIENTS}, {SET}"
# Of Horovod 0.28.1; gps is its global process set.
SIGNATURES = {
    "tensorflow": {
        "init": "comm=None, process_sets=None",
        "allreduce": f"tensor, average=None, {TENSOR_OPTIONS}, op=None, prescale_factor=1.0, "
        f"postscale_factor=1.0, name=None, {SET}, ignore_name_scope=False",
        "grouped_allreduce": f"tensors, average=None, {TENSOR_OPTIONS}, op=None, "
        f"prescale_factor=1.0, postscale_factor=1.0, {SET}, ignore_name_scope=False, name=None",
        "allgather": f"tensor, name=None, ignore_name_scope=False, {SET}",
        "grouped_allgather": f"tensors, name=None, ignore_name_scope=False, {SET}",
        "broadcast": f"tensor, root_rank, name=None, ignore_name_scope=False, {SET}",
        "broadcast_": f"variables, root_rank, name=None, {SET}",
        "alltoall": f"tensor, splits=None, name=None, ignore_name_scope=False, {SET}",
        "reducescatter": "tensor, device_dense='', compression=none, op=Average, name=None, "
        f"{SET}, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0",
        "grouped_reducescatter": f"tensors, device_dense='', compression=none, op=Average, {SET}, "
        "prescale_factor=1.0, postscale_factor=1.0",
        "join": "",
        "broadcast_variables": f"variables, root_rank, {SET}, inplace=False",
        "broadcast_object": f"obj, root_rank=0, session=None, name=None, {SET}",
        "broadcast_object_fn": f"root_rank=0, session=None, name=None, {SET}",
        "allgather_object": f"obj, session=None, name=None, {SET}",
        "DistributedOptimizer": "optimizer, name=None, use_locking=False, "
        f"{TENSOR_OPTIONS}, sparse_as_dense=False, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, "
        f"groups=None, {SET}, scale_local_gradients=True",
        "DistributedGradientTape": f"{TAPE}, scale_local_gradients=True",
        "PartialDistributedGradientTape": f"{TAPE}, local_layers=None, scale_local_gradients=True",
        "rank_op": "name=None",
        "size_op": "process_set_id=0, name=None",
        "process_set_included_op": "process_set_id=0, name=None",
        "add_process_set": "process_set",
        "remove_process_set": "process_set",
        "SyncBatchNormalization": "fused=False, **kwargs",
    },
    "tensorflow.keras": {
        "DistributedOptimizer": f"optimizer, name=None, {TENSOR_OPTIONS}, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, "
        f"average_aggregated_gradients=False, num_groups=0, groups=None, {SET}, "
        "scale_local_gradients=True",
        "allreduce": "value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, "
        "op=None, compression=none",
        "allgather": "value, name=None",
        "broadcast": "value, root_rank, name=None",
        "reducescatter": "value, name=None, op=Average",
        "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=none, "
        "legacy_opts=False",
    },
    "keras": {
        "DistributedOptimizer": f"optimizer, name=None, {TENSOR_OPTIONS}, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, num_groups=0, groups=None",
        "PartialDistributedOptimizer": f"optimizer, name=None, {TENSOR_OPTIONS}, "
        "sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, "
        "backward_passes_per_step=1, average_aggregated_gradients=False, groups=None, "
        f"{SET}, local_layers=None, scale_local_gradients=True",
        "allreduce": "value, name=None, average=True, prescale_factor=1.0, postscale_factor=1.0, "
        "op=None, compression=none",
    },
    "keras.callbacks": {
        "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
        "MetricAverageCallback": "device=''",
        "LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, "
        "staircase=True, momentum_correction=True, steps_per_epoch=None",
        "LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, "
        "steps_per_epoch=None, verbose=0",
        "BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, "
        "mode='auto', save_freq='epoch'",
    },
}
LIFE = """
    init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
    ccl_built cuda_built rocm_built start_timeline stop_timeline ProcessSet global_process_set
    add_process_set remove_process_set Average Sum Compression
"""


def text_of(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    known = {id(hvd.global_process_set): "gps", id(hvd.Compression.none): "none"}
    default = known.get(id(parameter.default), repr(parameter.default))
    if parameter.name == "op" and default == "0":
        default = "Average"
    return f"{parameter.name}={default}"


@pytest.mark.parametrize(
    "module, name", [(m, name) for m, names in SIGNATURES.items() for name in names]
)
def test_signatures_are_horovods(module: str, name: str) -> None:
    function = getattr(importlib.import_module(f"keras_ring.horovod.{module}"), name)
    parameters = inspect.signature(function).parameters.values()
    assert ", ".join(map(text_of, parameters)) == SIGNATURES[module][name]


@pytest.mark.parametrize("module", [hvd, hvd_tf_keras, hvd_keras])
def test_names_of_the_life_cycle_are_there(module: Any) -> None:
    assert not [name for name in LIFE.split() if not hasattr(module, name)]
    assert module.rank() == kr.rank()
    assert module.size() == kr.size()
    assert module.cross_size() == kr.num_nodes()
    assert module.mpi_built()
    assert not module.gloo_built()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_allreduce_of_each_operation(op: int) -> None:
    values = np.array([float(kr.rank() + 1), 2.0], "float32")
    native = ["mean", "sum", "adasum", "min", "max", "product"][op]
    np.testing.assert_allclose(
        hvd.allreduce(values, op=op, name=f"o{op}"), kr.allreduce(values, native, name=f"n{op}")
    )


def test_average_and_op_together_are_refused_and_average_works() -> None:
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce([1.0], average=True, op=hvd.Sum)
    assert hvd.allreduce([1.0], average=False).numpy() == [kr.size()]
    assert hvd_keras.allreduce(2.0) == 2.0
    with pytest.raises(ValueError, match="supersedes average"):
        hvd_keras.allreduce(2.0, op=hvd.Sum)
    assert hvd_tf_keras.allreduce(2.0, op=hvd.Sum) == 2.0 * kr.size()


def test_slices_come_back_as_slices_beside_dense_tensors() -> None:
    slices = tf.IndexedSlices([[1.0], [2.0]], [0, kr.rank()], dense_shape=[kr.size(), 1])
    reduced, dense = hvd.grouped_allreduce([slices, tf.constant([3.0])], op=hvd.Sum)
    assert isinstance(reduced, tf.IndexedSlices)
    expected = np.full((kr.size(), 1), 2.0)
    expected[0] += kr.size()
    np.testing.assert_allclose(tf.convert_to_tensor(reduced), expected)
    assert dense.numpy() == [3.0 * kr.size()]
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices, op=hvd.Adasum)


class Half(hvd.Compressor):
    """A compressor of the user's own."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Half.calls += 1
        return tf.cast(tensor, tf.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor, ctx)


def test_compressors_of_the_user_are_called() -> None:
    Half.calls = 0
    result = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum, compression=Half)
    assert result.dtype == tf.float32
    np.testing.assert_allclose(result, [kr.size(), 2.0 * kr.size()])
    assert Half.calls == 1
    w = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = w * 2.0
    assert hvd.DistributedGradientTape(tape, compression=Half).gradient(loss, w).numpy() == [2.0]
    assert Half.calls == 2
    half = hvd.allreduce(tf.constant([1.5]), compression=hvd.Compression.fp16)
    assert half.numpy() == [1.5]


def test_derivatives_are_those_of_the_mean_of_all_losses() -> None:
    x = tf.Variable([[float(kr.rank())]])
    with tf.GradientTape(persistent=True) as tape:
        gathered = tf.reduce_sum(hvd.allgather(x))
        sent = tf.reduce_sum(hvd.broadcast(x, 0))
    assert tape.gradient(gathered, x).numpy() == [[1.0]]
    assert tape.gradient(sent, x).numpy() == [[1.0 if kr.rank() == 0 else 0.0]]


def test_moving_tensors_and_objects() -> None:
    rank, size = kr.rank(), kr.size()
    assert hvd.allgather(np.full(rank, rank)).numpy().tolist() == [
        r for r in range(size) for _ in range(r)
    ]
    rows, received = hvd.alltoall(np.full(size, rank), splits=[1] * size)
    assert rows.numpy().tolist() == list(range(size))
    assert received.numpy().tolist() == [1] * size
    part = hvd.reducescatter(np.ones((size, 1), "float32"), op=hvd.Sum)
    assert part.numpy().tolist() == [[size]]
    [only] = hvd.grouped_reducescatter([np.ones((size, 1), "float32")])
    assert only.numpy().tolist() == [[1.0]]
    variable = tf.Variable([float(rank)])
    assert hvd.broadcast_([variable], size - 1)[0] is variable
    assert variable.numpy() == [size - 1]
    hvd.broadcast_variables([variable], root_rank=0)
    assert hvd.broadcast_object({"rank": rank} if rank == 0 else None) == {"rank": 0}
    assert hvd.broadcast_object_fn(size - 1)(rank) == size - 1
    assert hvd.allgather_object(rank) == list(range(size))
    assert int(hvd.join()) in range(size)


def test_process_sets() -> None:
    assert hvd.global_process_set.size() == kr.size()
    assert hvd.global_process_set.process_set_id == 0
    first = hvd.ProcessSet([0])
    assert first.size() is first.rank() is first.included() is None
    if kr.size() == 1:  # they are those of the world
        with pytest.raises(ValueError, match="there is a process set"):
            hvd.add_process_set(first)
        return
    assert hvd.add_process_set(first) is first
    with pytest.raises(ValueError, match="there is a process set"):
        hvd.add_process_set([0])
    assert first.included() == (kr.rank() == 0)
    assert int(hvd.process_set_included_op(first.process_set_id)) == first.included()
    assert int(hvd.size_op(first.process_set_id)) == 1
    if first.included():
        assert hvd.allreduce([5.0], process_set=first).numpy() == [5.0]
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)


def test_errors_are_those_of_both() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        hvd.allreduce(np.ones(kr.rank() + 1), name="odd")
    assert isinstance(error.value, kr.MismatchError)
    assert "ranks disagree on shape" in error.value.message
    with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank is 99"):
        hvd.broadcast([1.0], 99)
    assert issubclass(HorovodInternalError, RuntimeError)
    assert hvd.allreduce([1.0]).numpy() == [1.0]


BATCHES = 4


def train(optimizer: Any, steps: list[list[int]]) -> np.ndarray:
    """One linear unit; each step's batch is made of the given numbered parts."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)]
    )
    model.compile(optimizer, "mse")
    for parts in steps:
        rng = [np.random.default_rng(part) for part in parts]
        x = np.concatenate([r.normal(size=(2, 2)) for r in rng]).astype("float32")
        model.train_on_batch(x, x[:, :1] * 3)
    return model.layers[0].kernel.numpy()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("averages", [False, True])
def test_backward_passes_are_joined_to_one_step(passes: int, averages: bool) -> None:
    rank, size = kr.rank(), kr.size()
    result = train(
        hvd_tf_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.05),
            backward_passes_per_step=passes,
            average_aggregated_gradients=averages,
            num_groups=1,
        ),
        [[step * size + rank] for step in range(BATCHES)],
    )

    rate = 0.05 if averages else 0.05 * passes
    expected = train(
        keras.optimizers.SGD(rate),
        [list(range(first * size, (first + passes) * size)) for first in range(0, BATCHES, passes)],
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_optimizer_leaves_registered_variables_alone() -> None:
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), scale_local_gradients=False
    )
    variable = keras.Variable([0.0])
    optimizer.register_local_var(variable)
    optimizer.apply([tf.constant([float(kr.rank())])], [variable])
    assert variable.numpy() == [-float(kr.rank())]


def test_tape_of_local_and_global_gradients() -> None:
    w = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = w * float(kr.rank())
    local, everywhere = hvd.DistributedGradientTape(tape).get_local_and_global_gradients(loss, [w])
    assert local[0].numpy() == [kr.rank()]
    np.testing.assert_allclose(everywhere[0], [(kr.size() - 1) / 2])


def test_sync_batch_normalization_is_that_of_the_joint_batch() -> None:
    """Ranks have different numbers of rows."""
    rows = [np.random.default_rng(r).normal(r, 1 + r, (3 + r, 2)) for r in range(kr.size())]
    rows = [r.astype("float32") for r in rows]
    layer, joint = (
        hvd.SyncBatchNormalization(momentum=0.5),
        keras.layers.BatchNormalization(momentum=0.5),
    )
    own = tf.Variable(rows[kr.rank()])
    everything = tf.Variable(np.concatenate(rows))
    weights = np.random.default_rng(9).normal(size=everything.shape).astype("float32")
    begin = sum(len(r) for r in rows[: kr.rank()])
    mine = slice(begin, begin + len(rows[kr.rank()]))

    with tf.GradientTape() as tape:
        y = layer(own, training=True)
        loss = tf.reduce_sum(y * weights[mine])
    with tf.GradientTape() as joint_tape:
        joint_y = joint(everything, training=True)
        joint_loss = tf.reduce_sum(joint_y * weights)

    np.testing.assert_allclose(y, joint_y[mine], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, joint.moving_variance, rtol=1e-4)
    np.testing.assert_allclose(
        tape.gradient(loss, own),
        joint_tape.gradient(joint_loss, everything)[mine],
        rtol=1e-3,
        atol=1e-4,
    )
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


def test_fit_with_callbacks(tmp_path) -> None:
    keras.utils.set_random_seed(kr.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1 * kr.size())), "mse")
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="set its filepath"):
        best.on_train_begin()
    best.filepath = str(tmp_path / "best.keras")
    x = np.random.default_rng(kr.rank()).normal(size=(8, 2)).astype("float32")

    history = model.fit(
        x,
        x[:, :1],
        epochs=3,
        verbose=0,
        callbacks=[
            hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_keras.callbacks.MetricAverageCallback(),
            hvd_keras.callbacks.LearningRateWarmupCallback(0.1 * kr.size(), 2),
            hvd_keras.callbacks.LearningRateScheduleCallback(0.1 * kr.size(), lambda _: 0.5, 2),
            best,
        ],
    )

    assert len({str(losses) for losses in kr.allgather_object(history.history["loss"])}) == 1
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.05 * kr.size(), rtol=1e-5)
    loaded = hvd_keras.load_model(best.filepath)
    assert hasattr(loaded.optimizer, "_keras_ring_reducer")


def test_what_is_gone_says_what_to_use() -> None:
    with pytest.raises(RuntimeError, match="no global variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(RuntimeError, match="no estimators"):
        hvd.BroadcastGlobalVariablesHook(0)
    with pytest.raises(NotImplementedError, match="does not train elastically yet"):
        hvd.elastic.run(lambda state: None)
    with pytest.raises(kr.ConfigError, match="takes optimizers of Keras 3, but got"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ValueError, match=r"not tensors of a tf\.function"):
        tf.function(lambda: hvd_keras.allreduce(tf.constant(1.0)))()
