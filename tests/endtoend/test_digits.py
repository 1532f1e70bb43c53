"""The example, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.timeout(180)
def test_digits_on_two_ranks_trains_one_model(mpirun: Any) -> None:
    result = mpirun(2, DIGITS, timeout=150).assert_ok().assert_no_orphans()

    accuracy = re.findall(r"^test accuracy: (0\.\d+)$", result.stdout, re.MULTILINE)
    assert len(accuracy) == 1
    assert float(accuracy[0]) >= 0.97
    assert "all 2 ranks hold the same weights: yes" in result.stdout
    # One bar, that of rank 0: each epoch is announced once.
    assert re.findall(r"Epoch (\d+)/15", result.stdout) == [str(e) for e in range(1, 16)]


def test_digits_is_short() -> None:
    assert len(DIGITS.read_text().splitlines()) < 60
