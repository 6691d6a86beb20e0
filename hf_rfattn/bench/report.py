"""Tables and plot of a benchmark from its result document.

A cell is one attention on one path at one length. A round is a set of cells with equal other labels: direction and pass
in `bench ops`, pass in `bench model`, batch in `bench decode`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ..results.documents import machine
from ..results.report import DASH, Block, Image, Table, crossover_text, in_bytes, measured_crossover, number, times
from ..results.schema import SOFTMAX
from .measuring import COMPILED, FUSED, TORCH, Document

Cell = dict[str, Any]
STYLES: dict[str, dict[str, Any]] = {TORCH: {}, COMPILED: {"linestyle": ":"}, FUSED: {"linestyle": "-."}}


def cells_of(result: Document) -> list[Cell]:
    """All cells by length, each with `bytes`, its memory if that was measured."""
    found = [{**cell, "bytes": cell.get("step_bytes") or cell.get("cache_bytes")} for cell in result["cells"]]
    return sorted(found, key=lambda cell: cell["length"])


def rows_of(result: Document) -> list[tuple[str, list[Cell]]]:
    """The cells of each row by length, with the name of their round."""
    rows: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells_of(result):
        rows.setdefault((_round(cell), cell["attention"], cell["features"], cell["path"]), []).append(cell)
    return [(key[0], row) for key, row in rows.items()]


def _round(cell: Cell) -> str:
    if "training" not in cell:
        return f"batch {cell['batch']}"
    name = "training" if cell["training"] else "inference"
    if "causal" not in cell:
        return name
    dtype = "" if cell["dtype"] == "float32" else f", {cell['dtype']}"
    return f"{'causal' if cell['causal'] else 'bidirectional'}, {name}{dtype}"


def label_of(cell: Cell) -> str:
    """Label of a row in tables and plots.

    >>> label_of({"attention": "favor+", "features": 64, "path": "fused"})
    'favor+, M = 64 (fused)'
    """
    count = f", M = {cell['features']}" if (cell["features"] or 0) > 1 else ""
    return f"{cell['attention']}{count}" + ("" if cell["path"] == TORCH else f" ({cell['path']})")


def speeds_of(row: Sequence[Cell]) -> tuple[list[int], list[float]]:
    """The lengths of a row, and its speed over softmax."""
    known = [cell for cell in row if cell["speed_over_softmax"]]
    return [cell["length"] for cell in known], [cell["speed_over_softmax"] for cell in known]


def report(result: Document, name: str) -> list[Block]:
    """Blocks with speed-up over softmax, break-even lengths, a plot, times of first calls, and missing rows."""
    what = "Time by length, log-log, with the lengths where mechanisms cross softmax"
    blocks: list[Block] = [speed_table(result), Image(f"{name}.png", what, partial(plot, result))]
    first = [(name, row) for name, row in rows_of(result) if "first_call_seconds" in row[0]]
    if first:
        title = "Seconds of the first call, which compiles"
        blocks.append(_table(title, first, lambda cell: f"{cell['first_call_seconds']:.1f}"))
    reasons = dict.fromkeys(f"Not measured: {label_of(e)}: {e['reason']}" for e in result.get("left_out", ()))
    return [*blocks, "\n".join(f"- {reason}" for reason in reasons)] if reasons else blocks


def speed_table(result: Document, lengths: Sequence[int] = ()) -> Table:
    """Table of speed-up over softmax, milliseconds and memory by length. `lengths` gives a short table for these
    lengths: the speed-up of inference with the smallest number of features.
    """

    def text(cell: Cell) -> str:
        speed = [] if cell["attention"] == SOFTMAX else [times(cell["speed_over_softmax"])]
        size = [in_bytes(cell["bytes"])] if cell["bytes"] else []
        return ", ".join(speed if lengths else [*speed, f"{number(cell['milliseconds']['median'], 3)} ms", *size])

    def in_brief(first: Cell) -> bool:
        return not (first["attention"] == SOFTMAX or first["training"]) and (first["features"] or 0) <= fewest

    rows = rows_of(result)
    fewest = min((row[0]["features"] for _, row in rows if (row[0]["features"] or 0) > 1), default=0)
    rows = [(name, row) for name, row in rows if not lengths or in_brief(row[0])]
    return _table("Speed over softmax", rows, text, lengths, break_even=True)


def _table(
    title: str,
    rows: list[tuple[str, list[Cell]]],
    text: Callable[[Cell], str],
    shown: Sequence[int] = (),
    break_even: bool = False,
) -> Table:
    """Table with a column per length (or those in `shown`) and optionally one for the break-even length."""
    measured = sorted({cell["length"] for _, row in rows for cell in row})
    lengths = [length for length in measured if length in shown] or measured
    lines = []
    for name, row in rows:
        own = {cell["length"]: text(cell) for cell in row}
        lines.append([name, label_of(row[0]), *(own.get(length, DASH) for length in lengths)])
        if break_even:
            lines[-1].append("" if row[0]["attention"] == SOFTMAX else crossover_text(*speeds_of(row)))
    headings = ["setting", "attention", *(f"{length:,} tokens" for length in lengths)]
    return Table(title, headings + ["faster from (break-even)"] * break_even, lines, aligned=False)


def plot(result: Document) -> Any:
    """Plot time by length on log-log axes, one panel per round, and the memory of the last round."""
    from ..results.plots import Line, Panel, draw

    panels = []
    for name, rows in groupby(rows_of(result), key=lambda found: found[0]):
        lines: list[Line] = []
        memory, break_even = [], []
        for _, row in rows:
            x, attention = [cell["length"] for cell in row], row[0]["attention"]
            lower, median, upper = ([cell["milliseconds"][key] for cell in row] for key in ("lower", "median", "upper"))
            paler = 0.5 ** sum(line.name == attention for line in lines)  # for more features and other paths
            about = {"name": attention, "style": {**STYLES[row[0]["path"]], "alpha": paler}}
            lines.append(Line(label_of(row[0]), x, median, (lower, upper), **about))
            if all(cell["bytes"] for cell in row):
                memory.append(Line(label_of(row[0]), x, [cell["bytes"] / 2**20 for cell in row], **about))
            length = None if attention == SOFTMAX else measured_crossover(*speeds_of(row))[1]
            break_even += [(length, attention)] if length else []
        panels.append(Panel(name, "length (tokens)", "milliseconds", lines, None, break_even))
    if memory:
        panels.append(Panel(f"Memory, {name}", "length (tokens)", "MiB", memory))
    columns = 2 if len(panels) == 4 else len(panels)
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    return draw(f"{_subject(result)}, {machine(result['hardware'])}", grid)


def _subject(result: Document) -> str:
    if "shape" in result:
        shape = result["shape"]
        return f"One attention layer, {shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    model = result["model"]
    size = f"{model['layers']} layers, {model['heads']} heads of {model['head_dim']}"
    return f"{'Generating one token: ' if 'decode' in result['kind'] else ''}{model['name']} ({size}), {model['dtype']}"
