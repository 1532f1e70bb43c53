"""Scenarios of TensorFlow's and Keras's own tests, from their wheels, over a RingStrategy."""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import keras_ring as kr

_TF = "tensorflow.python.distribute.strategy_test_lib"
_KERAS = "keras.src.trainers.trainer_test"


def module(name: str, *absent: str) -> Any:
    """Import a peer's tests; what they import for other backends may be absent."""
    stand_ins = {}
    for wanted in absent:
        try:
            importlib.import_module(wanted)
        except ImportError:
            stand_ins[wanted] = types.ModuleType(wanted)
    with mock.patch.dict(sys.modules, stand_ins):
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def skip_unless_two_ranks(test: unittest.TestCase) -> None:
    if kr.size() != 2:
        test.skipTest("two ranks are enough for the scenarios of others")


strategy_tests = module(_TF)
trainer_tests = module(_KERAS, "jax")


@unittest.skipIf(strategy_tests is None, f"this TensorFlow does not ship {_TF}")
class TestTensorFlowsScenarios(getattr(strategy_tests, "DistributionTestBase", unittest.TestCase)):
    """Those that fit one replica a process. The others look for all replicas in one."""

    def setUp(self):
        super().setUp()
        skip_unless_two_ranks(self)

    test_session = None  # TensorFlow's own, which is deprecated

    def test_minimize_loss(self):
        self._test_minimize_loss_eager(kr.RingStrategy())

    def test_call_and_merge_exceptions(self):
        self._test_call_and_merge_exceptions(kr.RingStrategy())

    def test_trainable_variable(self):
        self._test_trainable_variable(kr.RingStrategy())

    def test_global_step_update(self):
        self._test_global_step_update(kr.RingStrategy())

    def test_input_contexts(self):
        rank, size = kr.rank(), kr.size()
        rows = tf.data.Dataset.range(3 * size)
        input_fn = self._input_fn_to_test_input_context(
            lambda: rows.shard(size, rank),
            expected_num_replicas_in_sync=size,
            expected_num_input_pipelines=size,
            expected_input_pipeline_id=rank,
        )
        expected = [[i * size + rank] for i in range(3)]
        self._test_input_fn_iterable(kr.RingStrategy(), input_fn, expected)

    def test_summaries_of_replica_zero(self):
        if kr.rank() == 0:
            self._test_summary_for_replica_zero_only(kr.RingStrategy())
            return
        # The scenario wants the file's header and one summary, which this rank must not write.
        with pytest.raises(AssertionError, match="has length of 1, expected 2"):
            self._test_summary_for_replica_zero_only(kr.RingStrategy())

    def test_run(self):
        strategy_tests.OneDeviceDistributionTestBase._test_run(self, kr.RingStrategy())


# One or two of each kind: the whole class takes minutes.
_CHOSEN = (
    "callback_methods_keys",
    "callbacks_can_update_state_at_batch_boundary",
    "constraints_are_applied",
    "evaluate_flow_graph_fn",
    "evaluate_return_list_respect_metrics_order",
    "evaluate_with_custom_test_step_dict",
    "evaluate_with_different_batch_size_same_loss",
    "fit_flow_graph_fn",
    "fit_flow_steps_per_epoch_eager",
    "fit_with_custom_train_step",
    "fit_with_data_adapter_generator",
    "fit_with_data_adapter_py_dataset_infinite",
)


@unittest.skipIf(trainer_tests is None, f"this Keras does not ship {_KERAS}")
class TestKerassScenarios(getattr(trainer_tests, "TestTrainer", unittest.TestCase)):
    """Keras's trainer, in the scope of a RingStrategy."""

    def setUp(self):
        super().setUp()
        skip_unless_two_ranks(self)
        scope = kr.RingStrategy().scope()
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)


for _name in dir(TestKerassScenarios):
    if _name.startswith("test_") and _name.removeprefix("test_") not in _CHOSEN:
        setattr(TestKerassScenarios, _name, None)
