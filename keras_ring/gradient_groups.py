"""Which gradients are reduced by one op together.

The engine fuses whatever is ready into one transfer, but each op still costs TensorFlow's executor
and the agreement of the ranks about 10 us on each rank, which is more than the transfer of a bias
takes. So small gradients share an op. Large ones stay alone, to be on their way while backprop goes
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# In 10 us the ranks of one host reduce about 64 KiB.
SMALL_BYTES = 64 * 1024
# A group waits for its last gradient, so that a large one would leave much to do after backprop.
GROUP_BYTES = 1024 * 1024
GROUP_TENSORS = 32


def plan_groups(
    gradients: Sequence[Any],
    kinds: Sequence[str],
    wanted: int | Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Return the positions that are reduced together, in the order in which they become ready.

    Args:
        gradients: One for each variable; `None` and `tf.IndexedSlices` are left out.
        kinds: What else must be equal within a group, for each variable.
        wanted: What the user wants together, whatever its size: lists of positions, or into how
            many groups all are divided. Gradients of several dtypes or kinds still make several
            groups. Defaults to small gradients alone.

    Returns:
        Lists of positions, each descending, ordered by their first position, descending: backprop
        makes the last variables' gradients first. A rank that plans otherwise, because its model
        differs, begins some group at the same position as the others, which then is refused.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[str, str], tuple[list[int], int]] = {}
    dense = [
        i
        for i in reversed(range(len(gradients)))
        if gradients[i] is not None and not isinstance(gradients[i], tf.IndexedSlices)
    ]
    team_of = _teams(dense, wanted)
    teams: dict[tuple[int, str, str], list[int]] = {}
    for i in dense:
        gradient = gradients[i]
        if i in team_of:
            team = (team_of[i], gradient.dtype.name, kinds[i])
            if team not in teams:
                teams[team] = []
                groups.append(teams[team])
            teams[team].append(i)
            continue
        num_bytes = _static_bytes(gradient)
        if num_bytes is None or num_bytes > SMALL_BYTES:
            groups.append([i])
            continue
        kind = (gradient.dtype.name, kinds[i])
        group, so_far = open_groups.get(kind, ([], 0))
        if not group or len(group) == GROUP_TENSORS or so_far + num_bytes > GROUP_BYTES:
            group, so_far = [], 0
            groups.append(group)
        group.append(i)
        open_groups[kind] = (group, so_far + num_bytes)
    return groups


def _teams(dense: Sequence[int], wanted: int | Sequence[Sequence[int]] | None) -> dict[int, int]:
    """Return the number of the user's group for each position that is in one."""
    if wanted is None:
        return {}
    if isinstance(wanted, int):
        return {i: place * wanted // len(dense) for place, i in enumerate(dense)}
    return {i: number for number, group in enumerate(wanted) for i in group}


def _static_bytes(gradient: Any) -> int | None:
    """Bytes of a gradient; None where its shape is open until it runs."""
    num_elements = gradient.shape.num_elements()
    return None if num_elements is None else int(num_elements) * int(gradient.dtype.size)
