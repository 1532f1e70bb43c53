"""broadcast_variables: any kind of variable, any dtype, and what it refuses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr


@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_broadcast_variables_gives_the_root_s_values(make: Any) -> None:
    for root in range(kr.size()):
        variables = [
            make(np.full(shape, kr.rank(), "float32")) for shape in ((), (3,), (2, 0), (2, 2))
        ]

        kr.broadcast_variables(variables, root)

        for variable in variables:
            np.testing.assert_array_equal(variable, np.full(variable.shape, root))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "int64", "float16", "bfloat16", "float64", "complex64"]
)
def test_broadcast_variables_of_dtype(dtype: str) -> None:
    variable = tf.Variable(tf.cast([kr.rank() == 0, kr.rank() != 0], dtype))

    kr.broadcast_variables([variable])

    assert variable.dtype == dtype
    np.testing.assert_array_equal(tf.cast(variable, tf.float32), [1.0, 0.0])


def test_broadcast_variables_leaves_strings_alone() -> None:
    words = tf.Variable([f"rank {kr.rank()}"])
    numbers = tf.Variable([float(kr.rank())])

    kr.broadcast_variables([words, numbers])

    assert words.numpy()[0] == f"rank {kr.rank()}".encode()
    np.testing.assert_array_equal(numbers, [0.0])


def test_broadcast_variables_of_a_model_and_its_optimizer() -> None:
    keras.utils.set_random_seed(kr.rank())
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Normalization(mean=float(kr.rank()), variance=1.0),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1 * (1 + kr.rank())), "mse")
    model.fit(np.random.rand(8, 4), np.random.rand(8, 1), epochs=1 + kr.rank(), verbose=0)

    kr.broadcast_variables(model.variables)
    kr.broadcast_variables(model.optimizer.variables)

    values = [v.numpy().tobytes() for v in model.variables + model.optimizer.variables]
    assert len(set(kr.allgather_object(b"".join(values)))) == 1
    assert int(model.optimizer.iterations) == 1


def test_broadcast_variables_in_a_function() -> None:
    variable = tf.Variable([float(kr.rank())])

    @tf.function
    def call() -> tf.Tensor:
        kr.broadcast_variables([variable], kr.size() - 1)
        return variable * 2.0

    np.testing.assert_array_equal(call(), [2.0 * (kr.size() - 1)])
    np.testing.assert_array_equal(variable, [kr.size() - 1])


def test_broadcast_variables_of_none_does_nothing() -> None:
    kr.broadcast_variables([])
    kr.broadcast_variables(iter([]))


@pytest.mark.parametrize(
    "wrong", [[tf.constant(1.0)], [np.ones(2)], [1.0], tf.Variable([1.0, 2.0])]
)
def test_broadcast_variables_of_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(kr.ConfigError, match=r"expected variables, but got .*model\.variables"):
        kr.broadcast_variables(wrong)


@pytest.mark.parametrize("root", [-1, 99])
def test_broadcast_variables_from_a_missing_root_is_refused(root: int) -> None:
    with pytest.raises(kr.ConfigError, match=f"root_rank is {root}; expected a rank from 0 to"):
        kr.broadcast_variables([tf.Variable(1.0)], root)


def test_broadcast_variables_of_other_shapes_or_numbers_is_refused() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")
    is_last = kr.rank() == kr.size() - 1
    values = [tf.Variable(np.ones(3 if is_last else 2)), tf.Variable(float(kr.rank()))]

    with pytest.raises(kr.MismatchError, match=r"disagree on shape of tensor 0: .*\(2,\).*\(3,\)"):
        kr.broadcast_variables(values)
    with pytest.raises(kr.MismatchError, match="disagree on number of tensors: .*2.*1"):
        kr.broadcast_variables(values[1:] if is_last else values)

    assert float(values[1]) == kr.rank()  # all or none
