"""The length from which on one thing is faster than another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def measured_crossover(lengths: Sequence[int], speed_over_softmax: Sequence[float]) -> tuple[int | None, int | None]:
    """The shortest measured length from which on a mechanism stays faster than softmax, and where between the measured
    lengths the two are equally fast.

    The first is None for a mechanism that is not faster at the longest length. The second, read off a straight line
    between two points of a log-log plot, is None too where there is nothing to read it from: a mechanism that is faster
    at the shortest length already.

    >>> measured_crossover([128, 256, 512, 1024], [0.25, 0.5, 2.0, 4.0])
    (512, 362)
    >>> measured_crossover([128, 256, 512], [1.5, 0.9, 0.95])
    (None, None)
    """
    rows = sorted(zip(lengths, speed_over_softmax, strict=True))
    faster = len(rows)  # rows from here on are faster
    while faster and rows[faster - 1][1] > 1:
        faster -= 1
    if faster == len(rows):
        return None, None
    length, speed = rows[faster]
    if not faster:
        return length, None
    before, slower = rows[faster - 1]
    share = math.log(1 / slower) / math.log(speed / slower)
    return length, round(before * (length / before) ** share)


def crossover_text(found: Mapping[str, Any]) -> str:
    """A crossover as results hold it, {length, interpolated, lengths}, in a few characters.

    >>> crossover_text({"length": 512, "interpolated": 362}), crossover_text({"length": None, "lengths": [128, 1024]})
    ('512 (362)', 'not up to 1,024')
    """
    if found["length"] is None:
        return f"not up to {max(found['lengths']):,}"
    return f"{found['length']:,}" + (f" ({found['interpolated']:,})" if found["interpolated"] else "")
