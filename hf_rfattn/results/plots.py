"""Plot style: each mechanism or projection has the same colour and marker in all plots."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from .schema import SOFTMAX

BASELINE = "average"  # no attention
STYLES = {  # colour-blind safe palette of Okabe and Ito
    SOFTMAX: ("black", "*"),
    "favor+": ("#0072B2", "o"),
    "rff": ("#E69F00", "s"),
    "linear": ("#CC79A7", "D"),
    "hedgehog": ("#009E73", "^"),
    "fmm": ("#D55E00", "P"),
    "band": ("#56B4E9", "v"),
    "multipole": ("#332288", "d"),
    BASELINE: ("#666666", "x"),
    "iid": ("#666666", "o"),
    "orthogonal": ("#0072B2", "s"),
    "hadamard": ("#D55E00", "D"),
    "hadamard, 1 block": ("#E69F00", "^"),
    "hadamard, 2 blocks": ("#56B4E9", "v"),
    "hadamard, 3 blocks": ("#D55E00", "D"),
}


def line_style(name: str) -> dict[str, Any]:
    """Keywords for `Axes.plot`."""
    color, marker = STYLES.get(name, ("#999999", "."))
    return {"color": color, "marker": marker, "linestyle": "--" if name == BASELINE else "-"}


def draw_line(axes: Axes, x: Any, y: Any, band: tuple[Any, Any] | None = None, **style: Any) -> None:
    """Draw a line with an optional band from low to high."""
    axes.plot(x, y, **style)
    if band is not None:
        axes.fill_between(x, *band, color=style["color"], alpha=0.15, linewidth=0)


def rate_line(axes: Axes, x: Sequence[int], start: float, power: float, label: str) -> None:
    """Draw a thin reference line start · (x / x₀)^power."""
    y = [start * (each / x[0]) ** power for each in x]
    axes.plot(x, y, color="black", linewidth=0.8)
    middle = len(x) // 2
    axes.annotate(label, (x[middle], y[middle]), xytext=(4, 4), textcoords="offset points")


def log_log(axes: Axes, ticks: Sequence[float]) -> None:
    """Make both axes logarithmic, with plain numbers and a tick at every measured size (fewer if there are many).

    Call it last: the ticks on the y axis depend on its range.
    """
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = ticks[:: 1 + len(ticks) // 9]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    if high < 1e3 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if high < 1e6:
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)


def mark_crossover(
    axes: Axes, length: float, softmax: Mapping[int, float], number: int, color: str, alpha: float = 1.0
) -> None:
    """Mark a break-even length with a ring on the softmax line and a label below. Call it after `log_log`.

    `number`: index of the mark, so that labels do not overlap.
    """
    lengths = sorted(softmax)
    logs = [math.log(softmax[each]) for each in lengths]
    time = math.exp(np.interp(math.log(length), [math.log(each) for each in lengths], logs))
    bottom = axes.get_ylim()
    label = "break-even with softmax" if number == 0 else None
    axes.plot(length, time, "o", markersize=9, fillstyle="none", color=color, alpha=alpha, label=label)
    axes.plot([length, length], [bottom[0], time], color=color, alpha=0.5 * alpha, linewidth=0.8)
    axes.set_ylim(bottom)
    height = 0.02 + 0.045 * (number % 4)
    axes.annotate(f"{length:,}", (length, height), xycoords=("data", "axes fraction"), fontsize=8, color=color)


def title_and_legend(figure: Figure, title: str) -> None:
    """Add a title above and one legend for all panels below, both wrapped to the width of the figure."""
    characters = int(10 * figure.get_figwidth())  # per line, in the title's font
    figure.suptitle(textwrap.fill(title, characters))
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    columns = max(1, characters // (max(map(len, lines), default=1) + 6))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
