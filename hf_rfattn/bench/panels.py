"""Line plots of benchmarks and studies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..results import SOFTMAX

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Line:
    """A line. `name`: key of its colour and marker in `results.plots`, by default its label; `style`: overrides."""

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


def draw(title: str, grid: Sequence[Sequence[Panel]], width: float = 5.0) -> "Figure":
    """Draw a grid of panels with one legend."""
    from matplotlib.figure import Figure

    from ..results.plots import title_and_legend

    figure = Figure(figsize=(width * len(grid[0]), 3.7 * len(grid) + 1.2), layout="constrained")
    panels = [panel for line in grid for panel in line]
    for axes, panel in zip(figure.subplots(len(grid), len(grid[0]), squeeze=False).flat, panels, strict=True):
        _draw(axes, panel)
    title_and_legend(figure, title)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    from ..results.plots import draw_line, line_style, log_log, mark_crossover, rate_line

    for line in panel.lines:
        style = line_style(line.name or line.label) | {"markersize": 5, "label": line.label} | dict(line.style)
        draw_line(axes, line.x, line.y, line.band, **style)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if panel.categories:
        axes.set_xticks(range(len(panel.categories)), panel.categories)
        axes.grid(alpha=0.3)
        return
    sizes: Any = sorted({x for line in panel.lines for x in line.x})
    if panel.rate is not None:
        top = max(y for line in panel.lines for y in line.y)
        rate_line(axes, sizes, 1.3 * top, *panel.rate)
    log_log(axes, sizes)
    softmax: Any = next((dict(zip(line.x, line.y, strict=True)) for line in panel.lines if line.label == SOFTMAX), {})
    for number, (length, name) in enumerate(panel.break_even):
        mark_crossover(axes, length, softmax, number, line_style(name)["color"])
