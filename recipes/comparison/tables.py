"""The report of a comparison, from its summary alone: what is said about accuracy, speed, and how it was made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_rfattn.results import (
    CONTROLS,
    SOFTMAX,
    Block,
    Heading,
    Image,
    Paragraph,
    Table,
    as_html,
    as_markdown,
    in_bytes,
    number,
    times,
    write_images,
    write_result,
)
from hf_rfattn.results.report import DASH

from .figures import crossover, pareto

Json = Mapping[str, Any]
DROPOUT = "Only the softmax rows use attention dropout, which may be a disadvantage in a short training."


def write_report(summary: Json, folder: Path) -> list[Path]:
    """report.md with its plots, report.html, report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = list(report(summary))
    write_result(summary, folder / "report.json")
    write_images(blocks, folder)
    (folder / "report.md").write_text(as_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(as_html(summary["title"], blocks), encoding="utf-8")
    return [folder / "report.html", folder / "report.md", folder / "report.json"]


def report(summary: Json) -> Iterator[Block]:
    yield Heading(summary["title"], 1)
    yield from accuracy(summary)
    yield from speed_of(summary)
    yield from origin(summary)


def accuracy(summary: Json) -> Iterator[Block]:
    """All tasks at a glance, the plot, then a table a task."""
    if not summary["accuracy"]:
        return
    yield Heading("Accuracy")
    yield Paragraph(
        "All rows of a task have the same budget: model, data, steps and learning rate of the weights. Mean ± standard "
        "deviation over seeds. The controls `average` (no attention at all) and `band` (a window alone) are not meant "
        "to be used; rows that do not beat them show no benefit from attention. Errors are those of attention outputs "
        f"relative to softmax, mean over layers, before and after training. {DROPOUT}"
    )
    yield overview_table(summary)
    yield from map(Paragraph, not_learnt(summary))
    yield from stages(summary)
    if figure := pareto(summary):
        yield Image("pareto.png", "Accuracy against training speed, a panel a task", lambda: figure)
    for table in summary["accuracy"]:
        yield Heading(title_of(table, summary["accuracy"]), 3)
        yield from _task(table)


def _grid(
    summary: Json,
    tables: Sequence[Json],
    cell: Callable[[Json, Json], str],
    *,
    metrics: bool = True,
    headings: Sequence[str] = (),
    more: Callable[[Json], Sequence[str]] = lambda each: (),
) -> Table:
    """A row for each attention and a column for each task; `more` gives the cells below further headings."""
    rows, kinds = [], []
    for each in summary["overview"]:
        found = [next((row for row in table["rows"] if row["row"] == each["row"]), None) for table in tables]
        cells = [DASH if row is None else cell(table, row) for table, row in zip(tables, found, strict=True)]
        rows.append([each["row"], *cells, *more(each)])
        kinds.append(kind(each["attention"], each["control"]))
    titles = [title_of(table, tables) + (f": {metric_name(table)}" if metrics else "") for table in tables]
    return Table("", ["attention", *titles, *headings], rows, kinds)


def overview_table(summary: Json) -> Table:
    """A column a task, and the mean share of softmax's score; of a loss, how many times softmax's it is."""
    shared = _has_shares(summary)

    def cell(table: Json, row: Json) -> str:
        loss = f" ({row['over_softmax']:.3f} ×)" if table["lower_is_better"] and row["over_softmax"] else ""
        return score(row["metric"], table["scale"]) + ("" if row["learnt"] else " (chance)") + loss

    def more(each: Json) -> list[str]:
        return [*([percent(each["mean_share_of_softmax"])] if shared else []), each["control"] or ""]

    headings = [*(["mean share of softmax's score"] if shared else []), ""]
    return _grid(summary, summary["accuracy"], cell, headings=headings, more=more)


def not_learnt(summary: Json) -> Iterator[str]:
    """Which tasks softmax has not learnt, and what "(chance)" means."""
    tables = summary["accuracy"]
    for table in tables:
        if not table["learnt"]:
            chance = score({"mean": table["chance"], "spread": None}, table["scale"])
            yield (
                f"{title_of(table, tables)} was not learnt: softmax is not above chance ({chance}) by more than two "
                "standard errors. Its scores say nothing about attention and do not count in the mean shares."
            )
    if any(not row["learnt"] for table in tables for row in table["rows"]):
        yield "(chance): not above chance by more than two standard errors, so the task was not learnt."


def row_options(summary: Json) -> str:
    """What each row is, where its name does not say it; with the tasks where that differs."""
    told = []
    for each in summary["overview"]:
        by_options: dict[str, list[str]] = {}
        for table in summary["accuracy"]:
            for row in table["rows"]:
                if row["row"] == each["row"]:
                    by_options.setdefault(row["attention"], []).append(title_of(table, summary["accuracy"]))
        if list(by_options) != [each["row"]]:
            several = len(by_options) > 1
            said = [f"{o} ({', '.join(parts)})" if several else o for o, parts in by_options.items()]
            told.append(f"`{each['row']}` is {' and '.join(said)}")
    return f"Options that are not the default: {'; '.join(told)}." if told else ""


def stages(summary: Json) -> Iterator[Block]:
    """What each step brings, where runs were evaluated before training too."""

    def looked(row: Json) -> bool:
        return any(value["mean"] is not None for value in row["stages"].values())

    def scores(table: Json, row: Json) -> str:
        steps = [*row["stages"].values(), row["metric"]]
        return " → ".join(score({**s, "spread": None}, table["scale"]) for s in steps if s["mean"] is not None) or DASH

    def errors(table: Json, row: Json) -> str:
        found = row["attention_error"] or {}
        steps = [found.get(when) for when in ("before", "transferred", "after")]
        return " → ".join(f"{step:.2f}" for step in steps if step is not None) or DASH

    def shares(each: Json) -> list[str]:
        return list(map(percent, [*each["mean_share_by_stage"].values(), each["mean_share_of_softmax"]]))

    tables = [table for table in summary["accuracy"] if any(map(looked, table["rows"]))]
    if not tables:
        return
    said = (
        "What each step brings: patched, without training → after attention transfer, if the row has it → fine-tuned."
    )
    if _has_shares(summary):
        said += " Mean shares are of the scores of softmax, before its further training for the first two."
        headings = [f"mean share, {name}" for name in ("patched", "after transfer", "fine-tuned")]
        table = _grid(summary, tables, scores, headings=headings, more=shares)
    else:
        table = _grid(summary, tables, scores)
    yield Paragraph(said)
    yield table
    found = _grid(summary, tables, errors, metrics=False)
    measured = [i for i, row in enumerate(found.rows) if set(row[1:]) != {DASH}]
    if measured:
        yield Paragraph("The relative error of attention outputs against softmax at the same steps, mean over layers.")
        yield Table("", found.headings, [found.rows[i] for i in measured], [found.kinds[i] for i in measured])


def _has_shares(summary: Json) -> bool:
    return any(each["mean_share_of_softmax"] is not None for each in summary["overview"])


def title_of(table: Json, tables: Sequence[Json]) -> str:
    """The task, with the length where it has several."""
    several = len({other["length"] for other in tables if other["part"] == table["part"]}) > 1
    return f"{table['part']}, {table['length']:,} tokens" if several else str(table["part"])


def budget_of(table: Json) -> str:
    """What was trained on what, for how long."""
    data = " ".join(filter(None, [table["dataset"]["name"], table["dataset"].get("config")]))
    unit = "tokens" if table["metric"] == "perplexity" else "examples"
    budget = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in table["budget"].items())
    processes = f"; {table['processes']} processes" if table["processes"] > 1 else ""
    return (
        f"{table['model']} on {data}, {metric_name(table)} on {table['examples']:,} {unit} of "
        f"{table['dataset']['split']}; {budget}{processes}."
    )


def _task(table: Json) -> Iterator[Block]:
    rows = []
    for row in table["rows"]:
        over, errors = row["over_softmax"], row["attention_error"] or {}
        share = f"{over:.3f} ×" if table["lower_is_better"] and over else percent(over)
        rows.append(
            [
                row["row"],
                score(row["metric"], table["scale"]),
                share if row["learnt"] else "not learnt",
                percent(row["from_average_to_softmax"]),
                rate(row["samples_per_second"]),
                *(DASH if errors.get(when) is None else f"{errors[when]:.2f}" for when in ("before", "after")),
                ", ".join(map(str, row["seeds"])),
                row["attention"],
                row["control"] or "",
            ]
        )
    headings = [
        "attention", metric_name(table), "times softmax's" if table["lower_is_better"] else "share of softmax's",
        "from average to softmax", "samples/s", "error before", "error after", "seeds", "options", "",
    ]  # fmt: skip
    yield Paragraph(budget_of(table))
    yield Table("", headings, rows, [kind(row["attention"], row["control"]) for row in table["rows"]])


def speed_of(summary: Json) -> Iterator[Block]:
    """Training, by task, length and processes."""
    yield Heading("Training speed and memory")
    yield Paragraph(
        "Training steps alone, without the first three. Memory is the peak of the largest process. Scaling is the "
        "speed of all processes over as many times that of one with the same number of threads (100 % is perfect)."
    )
    groups: dict[str, list[Json]] = {}
    for each in summary["speed"]:
        groups.setdefault(f"{each['part']}: {each['model']}, {each['machine']} a process", []).append(each)
    headings = ["attention", "length", "processes", "samples/s", "tokens/s", "over softmax", "scaling", "peak memory"]
    for title, found in groups.items():
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
            for each in found
        ]
        yield Table(title, headings, rows, [kind(each["attention"], each["control"]) for each in found])
    if figure := crossover(summary):
        what = "Tokens a second in training by length; rings mark where a row equals softmax"
        yield Image("crossover.png", what, lambda: figure)
    if summary["crossovers"]:
        said = [f"{each['row']} ({each['part']}) {crossing(each)}" for each in summary["crossovers"]]
        yield Paragraph(f"Trains faster than softmax: {'; '.join(said)}.")


def crossing(each: Json) -> str:
    if each["length"] is None:
        return f"at no length up to {max(each['lengths']):,}"
    if each["interpolated"] is None:
        return f"from {each['length']:,} tokens on, the shortest length measured"
    return f"from about {each['interpolated']:,} tokens on (measured: {each['length']:,} and longer)"


def origin(summary: Json) -> Iterator[Block]:
    commits = [
        (each["commit"] or "a commit that was not recorded") + (" with uncommitted changes" if each["changed"] else "")
        for each in summary["commits"]
    ]
    versions = [", ".join(f"{k} {v}" for k, v in each.items() if v) for each in summary["versions"]]
    yield Heading("How it was made")
    yield Paragraph(
        f"From {len(summary['files'])} result files and nothing else. On {' and '.join(summary['machines'])} a "
        f"process; hf_rfattn at {', '.join(commits)}; {'; or '.join(versions)}."
    )


def metric_name(table: Json) -> str:
    return str(table["metric"]).replace("_", " ")


def kind(attention: str, control: str | None) -> str:
    return SOFTMAX if attention == SOFTMAX else "control" if control in CONTROLS else ""


def score(value: Json, scale: float | None) -> str:
    """Scores in percent, others as they are."""
    if not scale:
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
