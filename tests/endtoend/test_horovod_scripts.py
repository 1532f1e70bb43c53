"""Scripts of Horovod's users, in which the import alone is another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "horovod_scripts"
# One job for all: TensorFlow's start takes longer than any of them.
PROGRAM = f"""
import runpy, sys

sys.argv[1:] = ["240"]
for name in ("mnist_loop", "mnist_fit", "synthetic"):
    runpy.run_path(f"{SCRIPTS}/{{name}}.py", run_name="__main__")
"""


@pytest.mark.timeout(240)
def test_scripts_of_horovods_users_run_on_two_ranks(mpirun: Any) -> None:
    result = mpirun(2, PROGRAM, timeout=220).assert_ok().assert_no_orphans()

    [loss] = re.findall(r"mnist_loop: loss ([\d.]+)", result.stdout)
    assert float(loss) < 0.5, result.stdout
    [accuracy] = re.findall(r"mnist_fit: accuracy ([\d.]+)", result.stdout)
    assert float(accuracy) > 0.8, result.stdout
    assert re.search(r"synthetic: [\d.]+ images/s on 2 ranks, weights alike: True", result.stdout)


@pytest.mark.parametrize("name", ["mnist_loop", "mnist_fit", "synthetic"])
def test_scripts_know_nothing_but_horovods_names(name: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text()
    assert re.findall(r"keras_ring[\w.]*", text) in (
        ["keras_ring.horovod.tensorflow"],
        ["keras_ring.horovod.tensorflow.keras"],
    )
