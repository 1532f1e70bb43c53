"""Options of the tests that start and disturb jobs."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "lost ranks (test_survivors.py)")
    group.addoption("--kills", type=int, default=3, help="how many ranks are killed at random")
