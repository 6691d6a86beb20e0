"""The report of a comparison, made from its summary: scores, speed, and how it was measured."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_rfattn.results import (
    CONTROLS,
    SOFTMAX,
    STAGES,
    Block,
    Heading,
    Image,
    Paragraph,
    Table,
    as_html,
    as_markdown,
    crossover_text,
    in_bytes,
    number,
    times,
    write_images,
    write_result,
)

from .figures import crossover, pareto
from .summary import WHEN, crossovers

Json = Mapping[str, Any]
DASH = "–"
INTRODUCTION = (
    "All rows of a task have the same budget: model, data, steps and learning rate. Scores are mean ± standard "
    "deviation over seeds; (chance) marks scores that are not more than two standard errors above the best constant "
    "answer. The controls are `average` (no attention) and `band` (a window alone): rows that do not beat them show no "
    "benefit from attention. Errors are those of attention outputs relative to softmax, mean over layers: untrained → "
    "after attention transfer → after training. Only the softmax rows use attention dropout."
)


def write_report(summary: Json, folder: Path) -> list[Path]:
    """report.html, report.md with its plots, report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [Heading(summary["title"], 1), *report(summary)]
    write_result(summary, folder / "report.json")
    write_images(blocks, folder)
    (folder / "report.md").write_text(as_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(as_html(summary["title"], blocks), encoding="utf-8")
    return [folder / "report.html", folder / "report.md", folder / "report.json"]


def report(summary: Json, level: int = 2, folder: str = "") -> Iterator[Block]:
    """Its sections, with headings from this level on; `folder`: where plots are."""
    if summary["accuracy"]:
        yield Heading("Scores", level)
        yield Paragraph(INTRODUCTION)
        yield overview_table(summary)
        if figure := pareto(summary):
            yield Image(f"{folder}pareto.png", "Score against speed, one panel per task", lambda: figure)
        for table in summary["accuracy"]:
            yield Heading(title_of(table, summary["accuracy"]), level + 1)
            yield Paragraph(budget_of(table))
            yield task_table(table)
    yield from speed(summary, level, folder)
    yield Heading("How it was measured", level)
    versions = "; or ".join(", ".join(f"{k} {v}" for k, v in each.items() if v) for each in summary["versions"])
    yield Paragraph(
        f"From {len(summary['files'])} result files. Hardware of each process: {' and '.join(summary['machines'])}. "
        f"hf_rfattn at {', '.join(each[:10] for each in summary['commits'])}; {versions}."
    )


def overview_table(summary: Json) -> Table:
    """A row for each attention, a column for each task, and the mean share of softmax's score.

    The mean is over tasks that softmax has learnt, of rows that are in all of them; losses do not count.
    """
    tables = summary["accuracy"]
    found: dict[str, list[Json | None]] = {}
    for table in tables:
        for row in table["rows"]:
            found.setdefault(row["row"], [next((r for r in t["rows"] if r["row"] == row["row"]), None) for t in tables])
    counted = [table["learnt"] and not table["lower_is_better"] for table in tables]
    lines = []
    for name, rows in found.items():
        there = [row for row in rows if row]
        control = next((row["control"] for row in there if row["control"]), None)
        shares = [row and row["over_softmax"] for row, counts in zip(rows, counted, strict=True) if counts]
        share = percent(statistics.mean(shares) if shares and None not in shares else None)
        cells = [score(table, row) if row else DASH for table, row in zip(tables, rows, strict=True)]
        kind = kind_of(there[0]["attention"], control)
        lines.append((kind, [name, *cells, *([share] if any(counted) else []), control or ""]))
    lines.sort(key=lambda line: [SOFTMAX, "", "control"].index(line[0]))
    titles = [f"{title_of(table, tables)}: {metric_name(table)}" for table in tables]
    headings = ["attention", *titles, *(["mean share of softmax's score"] if any(counted) else []), ""]
    return Table("", headings, [cells for _, cells in lines], [kind for kind, _ in lines])


def task_table(table: Json) -> Table:
    """Score and speed of one task."""
    stages = [stage for stage in STAGES if any(row["stages"][stage]["mean"] is not None for row in table["rows"])]
    rows = []
    for row in table["rows"]:
        errors = [row["attention_error"][when] for when in WHEN]
        over = row["over_softmax"]
        rows.append(
            [
                row["row"],
                *(in_unit(row["stages"][stage], table["scale"]) for stage in stages),
                score(table, row),
                (f"{over:.3f} ×" if table["lower_is_better"] else percent(over)) if over else DASH,
                rate(row["samples_per_second"]),
                times(row["speed_over_softmax"]),
                in_bytes(row["peak_memory_bytes"]) if row["peak_memory_bytes"] else DASH,
                " → ".join(f"{error:.2f}" for error in errors if error is not None) or DASH,
                ", ".join(map(str, row["seeds"])),
                row["attention"],
                row["control"] or "",
            ]
        )
    over = "times softmax's" if table["lower_is_better"] else "share of softmax's"
    headings = [
        "attention", *stages, metric_name(table), over, "samples/s", "over softmax", "peak memory", "error", "seeds",
        "options", "",
    ]  # fmt: skip
    return Table("", headings, rows, [kind_of(row["attention"], row["control"]) for row in table["rows"]])


def speed(summary: Json, level: int, folder: str) -> Iterator[Block]:
    """By length and processes, of tasks that were run with several, or were too short for scores."""
    judged = {table["part"] for table in summary["accuracy"]}
    parts: dict[str, list[Json]] = {}
    for each in summary["speed"]:
        parts.setdefault(each["part"], []).append(each)
    headings = ["attention", "length", "processes", "samples/s", "tokens/s", "over softmax", "scaling", "peak memory"]
    tables = []
    for part, entries in parts.items():
        if part in judged and len({(each["length"], each["processes"]) for each in entries}) == 1:
            continue  # the table of the task has it all
        rows = [
            [
                each["row"],
                f"{each['length']:,}",
                str(each["processes"]),
                rate(each["samples_per_second"]),
                rate(each["tokens_per_second"]),
                times(each["over_softmax"]),
                percent(each["efficiency"]) if each["processes"] > 1 else DASH,
                in_bytes(each["peak_memory_bytes"]) if each["peak_memory_bytes"] else DASH,
            ]
            for each in entries
        ]
        title = f"{part}: {entries[0]['model']}, {entries[0]['machine']} per process"
        tables.append(Table(title, headings, rows, [kind_of(e["attention"], e["control"]) for e in entries]))
    if not tables:
        return
    yield Heading("Speed and memory by length and processes", level)
    yield Paragraph(
        "Timed without the first three steps. Memory is the peak of the largest process. Scaling is the speed of n "
        "processes over n times that of one with the same number of threads."
    )
    yield from tables
    if figure := crossover(summary):
        yield Image(f"{folder}crossover.png", "Tokens per second by length, with break-even lengths", lambda: figure)
        found = [f"{each['row']} ({each['part']}) {crossover_text(each)}" for each in crossovers(summary)]
        yield Paragraph(f"Faster than softmax from this length on (interpolated break-even): {'; '.join(found)}.")


def title_of(table: Json, tables: Sequence[Json]) -> str:
    """The task, with the length where it has several."""
    several = len({other["length"] for other in tables if other["part"] == table["part"]}) > 1
    return f"{table['part']}, {table['length']:,} tokens" if several else str(table["part"])


def budget_of(table: Json) -> str:
    """What was trained on what, for how long."""
    data = " ".join(filter(None, [table["dataset"]["name"], table["dataset"].get("config")]))
    unit = "tokens" if table["metric"] == "perplexity" else "examples"
    budget = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in table["budget"].items())
    return (
        f"{table['model']} on {data}, {metric_name(table)} on {table['examples']:,} {unit} of "
        f"{table['dataset']['split']}; {budget}."
    )


def metric_name(table: Json) -> str:
    return str(table["metric"]).replace("_", " ")


def kind_of(attention: str, control: str | None) -> str:
    return SOFTMAX if attention == SOFTMAX else "control" if control in CONTROLS else ""


def score(table: Json, row: Json) -> str:
    return in_unit(row["metric"], table["scale"]) + ("" if row["learnt"] else " (chance)")


def in_unit(value: Json, scale: float | None) -> str:
    """Scores in percent, others as they are."""
    if not scale or value["mean"] is None:
        return rate(value, 4)
    text = f"{100 / scale * value['mean']:.1f}"
    return text if value["spread"] is None else f"{text} ± {100 / scale * value['spread']:.1f}"


def rate(value: Json, digits: int = 3) -> str:
    if value["mean"] is None:
        return DASH
    text = number(value["mean"], digits)
    return text if value["spread"] is None else f"{text} ± {number(value['spread'], 2)}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"
