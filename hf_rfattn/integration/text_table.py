"""Plain-text tables."""

from collections.abc import Iterable, Mapping, Sequence


def text_table(columns: Mapping[str, str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows under column titles. `columns` maps titles to "<" (left-aligned) or ">" (right-aligned).

    >>> print(text_table({"layer": "<", "error": ">"}, [(0, "0.125"), (1, "–")]))
    layer  error
    0      0.125
    1          –
    """
    lines = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = columns.values()
    padded = (zip(line, sides, widths, strict=True) for line in lines)
    return "\n".join("  ".join(f"{cell:{side}{width}}" for cell, side, width in line).rstrip() for line in padded)
