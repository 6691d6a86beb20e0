"""Tables and plot of `hf-rfattn bench model`, made from its result document alone."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ..results import SOFTMAX, machine
from ..results.plots import line_style, log_log, mark_crossover, title_and_legend
from .ops_report import crossover_text, milliseconds


def name_of_pass(training: bool) -> str:
    return "training step" if training else "inference"


def rows_of(result: dict[str, Any], attention: str, training: bool) -> list[dict[str, Any]]:
    """Cells of one attention and pass, by length."""
    found = [c for c in result["cells"] if (c["attention"], c["training"]) == (attention, training)]
    return sorted(found, key=lambda cell: cell["length"])


def title(result: dict[str, Any]) -> str:
    model = result["model"]
    size = f"{model['layers']} layers, {model['parameters'] / 1e6:.0f} M"
    return f"{model['name']} ({size}), {model['dtype']}, {machine(result['hardware'])}"


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """One a pass, a section each attention; below it from which length on each pays."""
    headings = ["length", "batch", "ms", "samples/s", "tokens/s", "speed over\nsoftmax", "memory"]
    for training in result["training"]:
        table = Table(title=f"{name_of_pass(training).capitalize()}: {title(result)}")
        table.add_column("attention", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", overflow="fold")
        for name in [SOFTMAX, *result["attention"]]:
            table.add_section()
            for cell in rows_of(result, name, training):
                table.add_row(
                    name,
                    f"{cell['length']:,}",
                    str(cell["batch"]),
                    milliseconds(cell),
                    f"{cell['samples_per_second']:,.3g}",
                    f"{cell['tokens_per_second']:,.0f}",
                    f"{cell['speed_over_softmax']:.2f}",
                    "–" if cell["step_bytes"] is None else f"{cell['step_bytes'] / 2**20:,.0f} MiB",
                )
        found = [each for each in result["crossovers"] if each["training"] == training]
        crossings = ", ".join(f"{each['attention']} {crossover_text(each)}" for each in found)
        table.caption = f"Faster than softmax from this length on (about where they are equal): {crossings}"
        yield table


def plot(result: dict[str, Any]) -> Figure:
    """Time of a sample by length for each pass, with crossovers, and the memory of the last pass; log-log."""
    passes = result["training"]
    figure = Figure(figsize=(5 * (len(passes) + 1), 5), layout="constrained")
    *times, memory = figure.subplots(1, len(passes) + 1, squeeze=False)[0]
    names = [SOFTMAX, *result["attention"]]
    for axes, training in zip(times, passes, strict=True):
        _times(axes, result, training, names)
    for name in names:
        row = [cell for cell in rows_of(result, name, passes[-1]) if cell["step_bytes"]]
        memory.plot([c["length"] for c in row], [c["step_bytes"] / 2**20 for c in row], **line_style(name))
    memory.set(title=f"Memory, {name_of_pass(passes[-1])}", xlabel="length (tokens)", ylabel="MiB")
    log_log(memory, result["lengths"])
    title_and_legend(figure, title(result))
    return figure


def _times(axes: Axes, result: dict[str, Any], training: bool, names: list[str]) -> None:
    medians: dict[str, dict[int, float]] = {}
    for name in names:
        row = rows_of(result, name, training)
        low, medians[name], high = (
            {cell["length"]: cell["milliseconds"][key] / cell["batch"] for cell in row}
            for key in ("lower", "median", "upper")
        )
        style, label = line_style(name), name if training == result["training"][0] else None
        axes.plot(list(medians[name]), list(medians[name].values()), label=label, **style)
        axes.fill_between(list(low), list(low.values()), list(high.values()), color=style["color"], alpha=0.15, lw=0)
    axes.set(title=name_of_pass(training).capitalize(), xlabel="length (tokens)", ylabel="milliseconds a sample")
    log_log(axes, result["lengths"])
    found = [each for each in result["crossovers"] if each["training"] == training and each["interpolated"]]
    for number, each in enumerate(found):
        color = line_style(each["attention"])["color"]
        mark_crossover(axes, each["interpolated"], medians[SOFTMAX], number, color)
