"""The plots of a comparison, from its summary alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_rfattn.results import CONTROLS, SOFTMAX
from hf_rfattn.results.plots import line_style, log_log, mark_crossover

PANELS = 3  # in a row


def pareto(summary: Mapping[str, Any]) -> Figure | None:
    """A panel a task: its metric against the speed of training. What lies on the line is beaten by nothing in both."""
    tables = [table for table in summary["accuracy"] if any(row["samples_per_second"]["mean"] for row in table["rows"])]
    if not tables:
        return None
    columns = min(PANELS, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.6, 4.2 * lines + 0.7), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(tables) :]:
        axes.remove()
    styles = row_styles(row for table in tables for row in table["rows"])
    handles: dict[str, Any] = {}
    for axes, table in zip(panels, tables, strict=False):
        handles |= _scatter(axes, table, styles)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 3 * columns), frameon=False
    )
    return figure


def row_styles(rows: Any) -> dict[str, dict[str, Any]]:
    """Colour and marker of a row are those of its mechanism; further rows of one mechanism are hollow, then small."""
    styles: dict[str, dict[str, Any]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        if row["row"] not in styles:
            count = seen[row["mechanism"]] = seen.get(row["mechanism"], 0) + 1
            fill = {"fillstyle": "none"} if count == 2 else {"markersize": 5} if count > 2 else {}
            styles[row["row"]] = {"markersize": 9, **line_style(row["mechanism"]), **fill}
    return styles


def _scatter(axes: Axes, table: Mapping[str, Any], styles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    points = [
        (row["samples_per_second"], row["metric"], row) for row in table["rows"] if row["samples_per_second"]["mean"]
    ]
    unit = 100 / table["scale"] if table["scale"] else 1.0
    handles = {}
    for speed, metric, row in points:
        style = {**styles[row["row"]], "linestyle": "none", "elinewidth": 0.8, "capsize": 2}
        height = None if metric["spread"] is None else unit * metric["spread"]
        label = f"{row['row']} (control)" if row["control"] in CONTROLS else row["row"]
        handles[label] = axes.errorbar(speed["mean"], unit * metric["mean"], height, speed["spread"], **style)
    sign = -1 if table["lower_is_better"] else 1
    front = best_of([(speed["mean"], sign * unit * metric["mean"]) for speed, metric, _ in points])
    axes.plot([x for x, _ in front], [sign * y for _, y in front], color="black", alpha=0.25, lw=4, zorder=0)
    if table["lower_is_better"]:
        axes.invert_yaxis()
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.yaxis.get_major_formatter().set_useOffset(False)
    what = table["metric"].replace("_", " ") + (" (%)" if table["scale"] else "")
    axes.set(
        title=f"{table['part']}, up to {table['length']:,} tokens",
        xlabel="training speed (samples/s)",
        ylabel=f"{what} (lower is better, and above)" if table["lower_is_better"] else what,
    )
    return handles


def best_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats in both.

    >>> best_of([(1, 3), (2, 2), (1.5, 1), (3, 1)])
    [(1, 3), (2, 2), (3, 1)]
    """
    return sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))


def crossover(summary: Mapping[str, Any]) -> Figure | None:
    """A panel for each task that was run at several lengths: tokens a second by length, with the lengths from which on
    rows are faster than softmax.
    """
    rounds = list(dict.fromkeys((each["part"], each["processes"]) for each in summary["crossovers"]))
    if not rounds:
        return None
    figure = Figure(figsize=(6.2 * len(rounds), 4.8), layout="constrained")
    for axes, (part, processes) in zip(figure.subplots(1, len(rounds), squeeze=False)[0], rounds, strict=True):
        _lines(axes, summary, part, processes)
    return figure


def _lines(axes: Axes, summary: Mapping[str, Any], part: str, processes: int) -> None:
    entries = [each for each in summary["speed"] if (each["part"], each["processes"]) == (part, processes)]
    styles = row_styles(entries)
    curves: dict[str, dict[int, float]] = {}
    for each in entries:
        if each["tokens_per_second"]["mean"]:
            curves.setdefault(each["row"], {})[each["length"]] = each["tokens_per_second"]["mean"]
    for row, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), label=row, **{**styles[row], "markersize": 6})
    log_log(axes, sorted({each["length"] for each in entries}))
    softmax = next((curves[each["row"]] for each in entries if each["attention"] == SOFTMAX), None)
    crossings = [
        each
        for each in summary["crossovers"]
        if (each["part"], each["processes"]) == (part, processes) and each["interpolated"]
    ]
    for number, each in enumerate(crossings):
        if softmax:
            color = line_style(each["mechanism"])["color"]
            mark_crossover(axes, each["interpolated"], softmax, number, color)
    count = f", {processes} processes" if processes > 1 else ""
    axes.set(title=f"{part}{count}: training by length", xlabel="length (tokens)", ylabel="tokens/s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)  # lines fill the panel
