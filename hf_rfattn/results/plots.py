"""Line plots of benchmarks and studies: a mechanism or projection has the same colour and marker in all plots."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    "exact_heads": ("#882255", "p"),
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


@dataclass(frozen=True)
class Line:
    """A line with an optional `band` from low to high. `name`: key of its colour and marker in `STYLES`, by default its
    label; `style`: overrides.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    name: str = ""
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """Lines on logarithmic axes, or over `categories` on linear ones.

    `rate`: exponent and label of a reference line. `break_even`: lengths to mark on the softmax line, each with the
    name that determines its colour.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    rate: tuple[float, str] | None = None
    break_even: Sequence[tuple[int, str]] = ()
    categories: Sequence[Any] = ()


def lines_of(
    rows: Iterable[Mapping[str, Any]], x: str, y: str, by: str, styles: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Line]:
    """One line for each value of the column `by`: column y against column x, with a band from low to high."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    lines = []
    for name, own in groups.items():
        columns = {key: [row[key] for row in own] for key in (x, y, "low", "high")}
        style = (styles or {}).get(name, {})
        lines.append(Line(name, columns[x], columns[y], (columns["low"], columns["high"]), style=style))
    return lines


def draw(title: str, grid: Sequence[Sequence[Panel]], width: float = 5.0) -> Figure:
    """Draw a grid of panels with one legend."""
    figure = Figure(figsize=(width * len(grid[0]), 3.7 * len(grid) + 1.2), layout="constrained")
    panels = [panel for line in grid for panel in line]
    for axes, panel in zip(figure.subplots(len(grid), len(grid[0]), squeeze=False).flat, panels, strict=True):
        _draw(axes, panel)
    title_and_legend(figure, title)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        style = line_style(line.name or line.label) | {"markersize": 5, "label": line.label} | dict(line.style)
        axes.plot(line.x, line.y, **style)
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)
    if panel.categories:
        axes.set_xticks(range(len(panel.categories)), panel.categories)
        return
    x = sorted({x for line in panel.lines for x in line.x})
    if panel.rate is not None:  # a thin line proportional to x^power
        power, label = panel.rate
        start = 1.3 * max(y for line in panel.lines for y in line.y)
        y = [start * (each / x[0]) ** power for each in x]
        axes.plot(x, y, color="black", linewidth=0.8)
        axes.annotate(label, (x[len(x) // 2], y[len(x) // 2]), xytext=(4, 4), textcoords="offset points")
    _make_logarithmic(axes, x)
    softmax = next((line for line in panel.lines if line.label == SOFTMAX), None)
    if softmax is not None and panel.break_even:
        _mark_break_even(axes, softmax, sorted(panel.break_even))


def _make_logarithmic(axes: Axes, ticks: Sequence[float]) -> None:
    """Make both axes logarithmic, with plain numbers and a tick at every measured size (fewer if there are many)."""
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


def _mark_break_even(axes: Axes, softmax: Line, marks: Sequence[tuple[int, str]]) -> None:
    """Mark break-even lengths with rings on the softmax line, and write them in an empty strip below all lines."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom * (bottom / top) ** 0.15, top)
    left, right = np.log(axes.get_xlim())
    axes.set_xlim(axes.get_xlim())
    lengths = [length for length, _ in marks]
    places = _spread((np.log(lengths) - left) / (right - left), width=0.11)
    times = np.exp(np.interp(np.log(lengths), np.log(softmax.x), np.log(softmax.y)))
    for number, ((length, name), place, time) in enumerate(zip(marks, places, times, strict=True)):
        thin: dict[str, Any] = {"color": line_style(name)["color"], "alpha": 0.5, "linewidth": 0.8}
        label = "break-even with softmax" if number == 0 else None
        axes.plot(length, time, "o", markersize=9, fillstyle="none", color=thin["color"], label=label)
        axes.plot([length, length], [bottom, time], **thin)
        text: dict[str, Any] = {"fontsize": 8, "color": thin["color"], "ha": "center", "textcoords": "axes fraction"}
        pointer = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": 0, "relpos": (0.5, 1)}
        axes.annotate(f"{length:,}", (length, bottom), (place, 0.02), arrowprops=pointer | thin, **text)


def _spread(places: np.ndarray, width: float) -> np.ndarray:
    """Move sorted places in [0, 1] apart, until labels of this width do not overlap and stay inside."""
    width = min(width, 1 / len(places))
    for _ in range(100):
        missing = np.maximum(0, width - np.diff(places)) / 2
        places = places - np.append(missing, 0) + np.append(0, missing)
        places = np.clip(places, width / 2, 1 - width / 2)
    return places


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
