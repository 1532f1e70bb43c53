"""A rank is lost while the others are inside a program that XLA has compiled."""

from __future__ import annotations

import re

END_WITHIN_S = 10.0
PROGRAM = """
import os, signal, threading, time
import tensorflow as tf
import keras_ring as kr
from keras_ring.errors import from_tf
kr.init()

@tf.function(jit_compile=True)
def step(x, times):
    for i in tf.range(times):
        many = [kr.allreduce(x + float(k), name=f"many/{k}") for k in range(12)]
        x = tf.add_n(many) * 0.01
    return x

def fault():
    print(f"FAULT {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

step(tf.ones(400), tf.constant(2))
if kr.rank() == 1:
    threading.Timer(0.5, fault).start()
try:
    step(tf.ones(400), tf.constant(10**9))
except tf.errors.OpError as error:
    print(f"CAUGHT {time.time()} {type(from_tf(error)).__name__}: {from_tf(error)}", flush=True)
    time.sleep(0.2)
    raise
"""


def test_rank_is_killed_inside_a_compiled_loop(mpirun) -> None:
    result = mpirun(2, PROGRAM, mpirun_args=["--with-ft", "ulfm"], timeout=100)

    result.assert_no_orphans()
    assert result.returncode != 0, result.output
    fault_s = float(re.search(r"FAULT ([\d.]+)", result.stdout)[1])
    caught = re.findall(r"CAUGHT ([\d.]+) PeerLostError: (allreduce 'many/\d+': .*)", result.stdout)
    ((when_s, message),) = caught
    assert float(when_s) - fault_s < END_WITHIN_S
    assert "rank 1 (host " in message
