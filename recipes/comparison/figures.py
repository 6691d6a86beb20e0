"""The plots of a comparison, made from its summary."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_rfattn.results import CONTROLS, SOFTMAX
from hf_rfattn.results.plots import line_style, log_log, mark_crossover, title_and_legend

from .summary import crossovers

PANELS = 3  # in a row


def pareto(summary: Mapping[str, Any]) -> Figure | None:
    """A panel per task: its score against throughput. No row beats those on the line in both."""
    timed = [sum(row["samples_per_second"]["mean"] is not None for row in t["rows"]) for t in summary["accuracy"]]
    tables = [table for table, rows in zip(summary["accuracy"], timed, strict=True) if rows > 1]
    if not tables:
        return None
    columns = min(PANELS, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.6, 4.2 * lines + 0.7), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    styles = row_styles(row for table in tables for row in table["rows"])
    for axes, table in zip(panels, tables, strict=False):
        _scatter(axes, table, styles)
    for axes in panels[len(tables) :]:
        axes.remove()
    title_and_legend(figure, summary["title"])
    return figure


def row_styles(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Colour and marker of a row are those of its mechanism; further rows of one mechanism are hollow."""
    styles: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for row in rows:
        if row["row"] not in styles:
            hollow = {"fillstyle": "none"} if row["mechanism"] in seen else {}
            styles[row["row"]] = {"markersize": 8, **line_style(row["mechanism"]), **hollow}
            seen.add(row["mechanism"])
    return styles


def _scatter(axes: Axes, table: Mapping[str, Any], styles: Mapping[str, dict[str, Any]]) -> None:
    unit = 100 / table["scale"] if table["scale"] else 1.0
    points = []
    for row in table["rows"]:
        rate, metric = row["samples_per_second"], row["metric"]
        if rate["mean"]:
            spread = None if metric["spread"] is None else unit * metric["spread"]
            label = f"{row['row']} (control)" if row["control"] in CONTROLS else row["row"]
            style = {**styles[row["row"]], "linestyle": "none", "elinewidth": 0.8, "capsize": 2}
            axes.errorbar(rate["mean"], unit * metric["mean"], spread, rate["spread"], label=label, **style)
            points.append((rate["mean"], unit * metric["mean"]))
    sign = -1 if table["lower_is_better"] else 1
    front = best_of([(x, sign * y) for x, y in points])
    axes.plot([x for x, _ in front], [sign * y for _, y in front], color="black", alpha=0.25, lw=4, zorder=0)
    if table["lower_is_better"]:
        axes.invert_yaxis()
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.yaxis.get_major_formatter().set_useOffset(False)
    what = table["metric"].replace("_", " ") + (" (%)" if table["scale"] else "")
    axes.set(title=f"{table['part']}, up to {table['length']:,} tokens", xlabel="samples per second", ylabel=what)


def best_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats in both.

    >>> best_of([(1, 3), (2, 2), (1.5, 1), (3, 1)])
    [(1, 3), (2, 2), (3, 1)]
    """
    return sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))


def crossover(summary: Mapping[str, Any]) -> Figure | None:
    """A panel for each task that was run at several lengths: tokens per second by length, break-even lengths marked."""
    found = crossovers(summary)
    rounds = list(dict.fromkeys((each["part"], each["processes"]) for each in found))
    if not rounds:
        return None
    figure = Figure(figsize=(6.2 * len(rounds), 4.8), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(rounds), squeeze=False)[0], rounds, strict=True):
        entries = [each for each in summary["speed"] if (each["part"], each["processes"]) == key]
        curves: dict[str, dict[int, float]] = {}
        for each in entries:
            if each["tokens_per_second"]["mean"]:
                curves.setdefault(each["row"], {})[each["length"]] = each["tokens_per_second"]["mean"]
        styles = row_styles(entries)
        for row, curve in curves.items():
            axes.plot(list(curve), list(curve.values()), label=row, **styles[row])
        log_log(axes, sorted({each["length"] for each in entries}))
        softmax = next((curves[each["row"]] for each in entries if each["attention"] == SOFTMAX), None)
        crossings = [each for each in found if (each["part"], each["processes"]) == key and each["interpolated"]]
        for number, each in enumerate(crossings if softmax else ()):
            mark_crossover(axes, each["interpolated"], softmax, number, line_style(each["mechanism"])["color"])
        axes.legend()
        axes.set(title=f"{key[0]}, {key[1]} process(es)", xlabel="sequence length", ylabel="tokens per second")
    return figure
