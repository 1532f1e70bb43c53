"""TensorFlow's auto-clustering compiles what is around collectives, and leaves them out."""

from __future__ import annotations

PROGRAM = """
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
import keras_ring as kr
kr.init()
n, rank = kr.size(), kr.rank()

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        for i in range(3):
            x_in = kr.allreduce(tf.tanh(x) * 2.0 + 1.0, "mean", name=f"layer{i}")
            x_in = tf.nn.relu(x_in) * x_in + x_in
        rows = kr.allgather(tf.exp(x_in * 0.1) + 1.0)
        loss = tf.reduce_sum(rows * rows) + tf.reduce_sum(kr.broadcast(x_in + 1.0, 1) * 3.0)
    return loss, tape.gradient(loss, x)

x = tf.constant(np.linspace(0.0, 1.0, 600).reshape(20, 30) + rank, tf.float32)
tf.config.run_functions_eagerly(True)
expected = step(x)
tf.config.run_functions_eagerly(False)
context.context().enable_graph_collection()
for _ in range(3):
    for result, value in zip(step(x), expected):
        np.testing.assert_allclose(result, value, rtol=2e-5)
kinds = set()
for graph in context.context().export_run_metadata().partition_graphs:
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        kinds |= {node.op for node in nodes}
print("compiled" if {"_XlaRun", "KerasRingAllreduce"} <= kinds else sorted(kinds), flush=True)
"""


def test_auto_clustering_never_swallows_a_collective(mpirun) -> None:
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"

    result = mpirun(2, PROGRAM, env={"TF_XLA_FLAGS": flags}, timeout=100)

    result.assert_ok().assert_no_orphans()
    assert result.stdout.split().count("compiled") == 2, result.output
