"""Tables and plot of `hf-rfattn bench decode`, made from its result document alone."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from ..results import SOFTMAX, machine
from ..results.plots import BASELINE, line_style, log_log, title_and_legend
from ..results.units import in_bytes

Cells = dict[tuple[str, int, int], dict[str, Any]]


def measured(result: dict[str, Any]) -> Cells:
    """Cells by attention, batch and context, without those that were skipped."""
    return {(c["attention"], c["batch"], c["context"]): c for c in result["cells"] if "skipped" not in c}


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Time for each batch, then bytes of one sequence."""
    cells, contexts = measured(result), result["contexts"]
    names = [SOFTMAX, *result["attention"]]
    for batch in result["batches"]:
        table = Table(title=f"ms per token, batch {batch} (in brackets: tokens/s over those of softmax)")
        table.add_column("attention")
        for context in contexts:
            table.add_column(f"{context:,}", justify="right")
        table.add_column("last / first", justify="right")
        for name in names:
            row = [cells.get((name, batch, context)) for context in contexts]
            table.add_row(name, *map(_time, row), _growth(row))
        yield table
    table = Table(title="bytes of cache, one sequence")
    table.add_column("attention")
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    batch = result["batches"][0]
    for name in names:
        row = [cells.get((name, batch, context)) for context in contexts]
        table.add_row(name, *("–" if cell is None else in_bytes(cell["cache_bytes"] / batch) for cell in row))
    yield table


def _time(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    spread, ratio = cell["ms_per_token"], cell["tokens_per_second_over_softmax"]
    half = (spread["upper"] - spread["lower"]) / 2
    beside = "" if ratio is None or cell["attention"] == SOFTMAX else f" ({ratio:.1f}×)"
    return f"{spread['median']:.1f} ±{half:.1f}{beside}"


def _growth(row: list[dict[str, Any] | None]) -> str:
    first, last = row[0], row[-1]
    if first is None or last is None:
        return "–"
    return f"{last['ms_per_token']['median'] / first['ms_per_token']['median']:.2f}"


def plot(result: dict[str, Any]) -> Figure:
    """Time (a panel each batch, quartiles shaded) and bytes by context, log-log."""
    cells, contexts, batches = measured(result), result["contexts"], result["batches"]
    figure = Figure(figsize=(4.6 * (len(batches) + 1), 5), layout="constrained")
    *left, right = figure.subplots(1, len(batches) + 1, squeeze=False)[0]
    for name in [SOFTMAX, *result["attention"]]:
        style, label = line_style(name), "average (no attention)" if name == BASELINE else name
        for axes, batch in zip(left, batches, strict=True):
            row = [cells[name, batch, context] for context in contexts if (name, batch, context) in cells]
            x = [cell["context"] for cell in row]
            spreads = [cell["ms_per_token"] for cell in row]
            axes.plot(x, [s["median"] for s in spreads], label=label if axes is left[0] else None, **style)
            low, high = [s["lower"] for s in spreads], [s["upper"] for s in spreads]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        row = [cells[name, batches[0], context] for context in contexts if (name, batches[0], context) in cells]
        sizes = [cell["cache_bytes"] / batches[0] / 2**20 for cell in row]
        right.plot([cell["context"] for cell in row], sizes, **style)
    for axes, batch in zip(left, batches, strict=True):
        axes.set(title=f"Time per token, batch {batch}", xlabel="context (tokens)", ylabel="milliseconds")
    right.set(title="Cache of one sequence", xlabel="context (tokens)", ylabel="MiB")
    for axes in (*left, right):
        log_log(axes, contexts)
    limits = [axes.get_ylim() for axes in left]
    for axes in left:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    title_and_legend(figure, _title(result))
    return figure


def _title(result: dict[str, Any]) -> str:
    model = result["model"]
    shape = f"{model['layers']} layers, {model['heads']} heads of {model['head_dim']}"
    return f"Generating a token: {model['name']} ({shape}), {model['dtype']}, {machine(result['hardware'])}"
