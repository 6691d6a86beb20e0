"""Tables and plot of `hf-rfattn bench ops`, made from its result document alone."""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..results import SOFTMAX, machine
from ..results.plots import line_style, log_log, mark_crossover, title_and_legend
from ..results.units import in_bytes
from .bars import AT_LEAST, MET

Cell = dict[str, Any]
SHADES = (1.0, 0.6, 0.35)  # of lines with more and more features


def cells_of(result: dict[str, Any], **labels: Any) -> list[Cell]:
    """Cells with these labels, by length."""
    found = [cell for cell in result["cells"] if all(cell[name] == value for name, value in labels.items())]
    return sorted(found, key=lambda cell: cell["length"])


def rounds(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every direction, pass and type that was measured."""
    for dtype, causal, training in product(result["dtypes"], result["causal"], result["training"]):
        yield {"dtype": dtype, "causal": causal, "training": training}


def name_of_round(causal: bool, training: bool, dtype: str | None = None) -> str:
    text = f"{'causal' if causal else 'bidirectional'}, {'forward and backward' if training else 'forward'}"
    return text if dtype is None else f"{text}, {dtype}"


def variants(cells: Iterable[Cell]) -> list[tuple[str, str, int | None]]:
    """Kind, name and features of all cells, each once, in their order."""
    return list(dict.fromkeys((cell["kind"], cell["name"], cell["features"]) for cell in cells))


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """One a round and mechanism; then crossovers, memory, what failed its check, and the bars."""
    for labels in rounds(result):
        for name in dict.fromkeys(each["name"] for each in result["attention"]):
            yield _times(result, name, labels)
    yield _crossovers(result)
    if result["memory"]:
        yield _memory(result)
    if not all(check["passed"] for check in result["checks"]):
        yield _failures(result)
    if result["bars"]:
        yield bars_table(result["bars"])


def _times(result: dict[str, Any], name: str, labels: dict[str, Any]) -> Table:
    """Rows are lengths, a section for each number of features: how it stands to softmax, to peers and to its limit."""
    own = cells_of(result, kind="mechanism", name=name, **labels)
    peers = list(dict.fromkeys(peer for cell in own for peer in cell.get("speed_over_peers", {})))
    limit = any("time_over_limit" in cell for cell in own)
    softmax = {cell["length"]: cell for cell in cells_of(result, kind=SOFTMAX, **labels)}
    table = Table(title=f"{name}, {name_of_round(**labels)}")
    headings = ["M", "length", "softmax\nms", f"{name}\nms", *(f"speed over\n{other}" for other in (SOFTMAX, *peers))]
    for heading in [*headings, "time over\nproducts"] if limit else headings:
        table.add_column(heading, justify="right", overflow="fold")
    for count in dict.fromkeys(cell["features"] for cell in own):
        table.add_section()
        for cell in own:
            if cell["features"] != count:
                continue
            ratios = [cell["speed_over_softmax"], *(cell.get("speed_over_peers", {}).get(peer) for peer in peers)]
            ratios += [cell.get("time_over_limit")] if limit else []
            times = milliseconds(softmax.get(cell["length"])), milliseconds(cell)
            table.add_row(str(count or "–"), f"{cell['length']:,}", *times, *map(_ratio, ratios))
    return table


def milliseconds(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    spread = cell["milliseconds"]
    half = (spread["upper"] - spread["lower"]) / 2
    digits = 0 if spread["median"] >= 100 else 1 if spread["median"] >= 10 else 2
    return f"{spread['median']:,.{digits}f} ±{half:,.{digits}f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _crossovers(result: dict[str, Any]) -> Table:
    table = Table(title="faster than softmax from this length on (about where the two are equal)")
    for heading in ("attention", "M", "dtype"):
        table.add_column(heading, justify="right" if heading == "M" else "left")
    passes = list(product(result["causal"], result["training"]))
    for causal, training in passes:
        table.add_column(name_of_round(causal, training), justify="right")
    found = {(c["attention"], c["features"], c["dtype"], c["causal"], c["training"]): c for c in result["crossovers"]}
    for name, features, dtype in dict.fromkeys(key[:3] for key in found):
        row = [found.get((name, features, dtype, *each)) for each in passes]
        table.add_row(name, str(features or "–"), dtype, *(crossover_text(each) if each else "–" for each in row))
    return table


def crossover_text(found: dict[str, Any]) -> str:
    if found["length"] is None:
        return f"not up to {max(found['lengths']):,}"
    return f"{found['length']:,}" + (f" ({found['interpolated']:,})" if found["interpolated"] else "")


def _memory(result: dict[str, Any]) -> Table:
    shape = result["shape"]
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    table = Table(title=f"memory of a training step of one layer, {heads}, float32")
    for heading in ("attention", "M", "direction", "length", "step", "whole process"):
        table.add_column(heading, justify="left" if heading in ("attention", "direction") else "right")
    for row in result["memory"]:
        sizes = (row["skipped"], "–") if "skipped" in row else map(in_bytes, (row["step_bytes"], row["peak_bytes"]))
        direction = "causal" if row["causal"] else "bidirectional"
        table.add_row(row["name"], str(row["features"] or "–"), direction, f"{row['length']:,}", *sizes)
    return table


def _failures(result: dict[str, Any]) -> Table:
    table = Table(title="not timed: differs from its definition")
    for heading in ("contender", "M", "round", "deviation", "tolerance"):
        table.add_column(heading)
    for check in result["checks"]:
        if not check["passed"]:
            where = name_of_round(check["causal"], check["training"], check["dtype"])
            numbers = (str(check["features"] or "–"), where, str(check["deviation"]), str(check["tolerance"]))
            table.add_row(check["name"], *numbers)
    return table


def bars_table(bars: list[dict[str, Any]]) -> Table:
    table = Table(title="bars")
    for heading in ("what", "bar", "value", "where", ""):
        table.add_column(heading, justify="right" if heading in ("bar", "value") else "left", no_wrap=heading == "bar")
    for bar in bars:
        sign = "≥" if bar["relation"] == AT_LEAST else "≤"
        value = "–" if bar["value"] is None else f"{bar['value']:,.4g}"
        table.add_row(bar["what"], f"{sign} {bar['bound']:,} {bar['unit']}", value, bar["where"], MET[bar["met"]])
    return table


def plot(result: dict[str, Any], dtype: str) -> Figure:
    """Time by length, log-log, a panel for each direction and pass; where a mechanism crosses softmax is marked."""
    directions, passes = result["causal"], result["training"]
    figure = Figure(figsize=(5.6 * len(passes), 4.4 * len(directions) + 1), layout="constrained")
    panels = figure.subplots(len(directions), len(passes), squeeze=False)
    for (row, causal), (column, training) in product(enumerate(directions), enumerate(passes)):
        _panel(panels[row][column], result, {"dtype": dtype, "causal": causal, "training": training})
    shape = result["shape"]
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    title = f"Time of one attention layer, {heads}, {dtype}, {machine(result['hardware'])}"
    title_and_legend(figure, title)
    return figure


def _panel(axes: Axes, result: dict[str, Any], labels: dict[str, Any]) -> None:
    cells = cells_of(result, **labels)
    counts = sorted({cell["features"] for cell in cells if cell["features"]})
    for kind, name, features in variants(cells):
        row = [cell for cell in cells if (cell["kind"], cell["name"], cell["features"]) == (kind, name, features)]
        x, spreads = [cell["length"] for cell in row], [cell["milliseconds"] for cell in row]
        style = line_style(name) | {"alpha": _shade(features, counts), "markersize": 4}
        label = f"{name}, M = {features}" if features else name
        if kind == "limit":
            style |= {"linestyle": ":", "marker": "", "linewidth": 1}
            label = f"matrix products of {label}"
        axes.plot(x, [s["median"] for s in spreads], label=label, **style)
        if kind != "limit":
            low, high = [s["lower"] for s in spreads], [s["upper"] for s in spreads]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(title=name_of_round(labels["causal"], labels["training"]), xlabel="length (tokens)", ylabel="milliseconds")
    log_log(axes, [length for length in result["lengths"] if math.log2(length).is_integer()] or result["lengths"])
    _mark_crossovers(axes, result, labels, counts)


def _shade(features: int | None, counts: list[int]) -> float:
    return SHADES[min(counts.index(features), len(SHADES) - 1)] if features else 1.0


def _mark_crossovers(axes: Axes, result: dict[str, Any], labels: dict[str, Any], counts: list[int]) -> None:
    softmax = {cell["length"]: cell["milliseconds"]["median"] for cell in cells_of(result, kind=SOFTMAX, **labels)}
    found = [c for c in result["crossovers"] if all(c[key] == value for key, value in labels.items())]
    for number, crossing in enumerate(c for c in found if c["interpolated"]):
        style = line_style(crossing["attention"])["color"], _shade(crossing["features"], counts)
        mark_crossover(axes, crossing["interpolated"], softmax, number, *style)
