"""How plots of studies look: one colour and marker a projection, confidence bands, lines of a known rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

STYLES: Mapping[str, tuple[str, str, str]] = {  # colour (Okabe and Ito), marker, line
    "iid": ("#666666", "o", "-"),
    "orthogonal": ("#0072B2", "s", "-"),
    "hadamard": ("#D55E00", "D", "-"),
    "hadamard, 1 block": ("#E69F00", "^", "-"),
    "hadamard, 2 blocks": ("#56B4E9", "v", "-"),
    "hadamard, 3 blocks": ("#D55E00", "D", "-"),
    "sum of 3 blocks": ("#CC79A7", "X", "--"),
}


def draw_band(axes: Axes, x: str, y: str, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Column y of rows against column x with its columns low and high, in the style of a projection."""
    color, marker, line = STYLES[name]
    where = [row[x] for row in rows]
    axes.plot(where, [row[y] for row in rows], color=color, marker=marker, linestyle=line, markersize=5, label=name)
    low, high = [row["low"] for row in rows], [row["high"] for row in rows]
    axes.fill_between(where, low, high, color=color, alpha=0.15, linewidth=0)


def rate_line(axes: Axes, counts: Sequence[int], start: float, power: float, label: str) -> None:
    """Log-log axes, a tick at every other count, and a thin line start · (M / M₀)^power."""
    y = [start * (count / counts[0]) ** power for count in counts]
    axes.plot(counts, y, color="black", linewidth=0.8)
    middle = len(counts) // 2
    axes.annotate(label, (counts[middle], y[middle]), xytext=(4, 4), textcoords="offset points")
    log_ticks(axes, counts)


def log_ticks(axes: Axes, counts: Sequence[int]) -> None:
    """Call it when everything is drawn: how many ticks there are depends on how many decades there are."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    step = 1 if len(counts) < 7 else 2
    axes.set_xticks(counts[::step], [f"{count:,}" for count in counts[::step]])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    if high < 200 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
