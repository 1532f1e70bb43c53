"""The example of HDF5 files, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "climate_segmentation.py"


@pytest.mark.timeout(180)
def test_two_ranks_that_read_their_own_parts_find_the_storms(mpirun: Any, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    result = mpirun(2, EXAMPLE, env=env, timeout=150).assert_ok().assert_no_orphans()

    (iou,) = re.findall(r"^storms found: IoU (\d\.\d+)$", result.stdout, re.MULTILINE)
    assert float(iou) >= 0.85
    # 768 fields in joint batches of 32, on one bar, that of rank 0.
    assert "24/24" in result.stdout
    assert re.findall(r"Epoch (\d+)/6", result.stdout) == [str(e) for e in range(1, 7)]
    assert not list(tmp_path.rglob("*.h5"))


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 90
