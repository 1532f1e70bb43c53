"""The examples of RingStrategy, as a user runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def accuracy_in(output: str) -> float:
    (accuracy,) = re.findall(r"^test accuracy: (\d\.\d+)$", output, re.MULTILINE)
    return float(accuracy)


@pytest.mark.timeout(180)
def test_fit_in_the_scope_on_two_ranks_trains_one_model(mpirun: Any) -> None:
    result = mpirun(2, EXAMPLES / "strategy_fit.py", timeout=150).assert_ok().assert_no_orphans()

    assert accuracy_in(result.stdout) >= 0.96
    assert "all 2 ranks hold the same weights: yes" in result.stdout
    # One bar, that of rank 0: each epoch is announced once.
    epochs = re.findall(r"Epoch (\d+)/12", result.stdout)
    assert epochs == [str(e + 1) for e in range(len(epochs))]


@pytest.mark.timeout(180)
def test_a_loop_of_ones_own_on_three_ranks_learns(mpirun: Any) -> None:
    result = mpirun(3, EXAMPLES / "custom_loop.py", timeout=150).assert_ok().assert_no_orphans()

    assert accuracy_in(result.stdout) >= 0.94
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", result.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("name", ["strategy_fit.py", "custom_loop.py"])
def test_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
