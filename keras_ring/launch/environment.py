"""What batch systems, MPI and this launcher say to a process through its environment.

`config.py` reads what concerns training; this is what concerns starting it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Where a rank reports to, as host:port, and the secret without which nobody is listened to.
REPORT_TO = "KERAS_RING_REPORT_TO"
REPORT_KEY = "KERAS_RING_REPORT_KEY"

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def current() -> dict[str, str]:
    """Return a copy of this process's environment variables."""
    return dict(os.environ)


def rank_of(environment: Mapping[str, str]) -> int | None:
    """Return the rank that MPI's launcher has given a process; None if there was no launcher."""
    for name in _RANKS:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None
