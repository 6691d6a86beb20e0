"""The report of a comparison, from its summary alone: what is said about accuracy, speed, and how it was made."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_rfattn.commands import in_bytes
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
    number,
    write_images,
    write_result,
)

from .figures import crossover, pareto

DASH = "–"
DROPOUT = (
    "Softmax has the attention dropout that its model asks for, other rows have none, which may be an advantage over a "
    "short training."
)


def write_report(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """report.md with its plots, report.html, report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = list(report(summary))
    write_result(dict(summary), folder / "report.json")
    write_images(blocks, folder)
    (folder / "report.md").write_text(as_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(as_html(summary["title"], blocks), encoding="utf-8")
    return [folder / "report.html", folder / "report.md", folder / "report.json"]


def report(summary: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading(summary["title"], 1)
    yield from accuracy(summary)
    yield from speed_of(summary)
    yield from origin(summary)


def accuracy(summary: Mapping[str, Any]) -> Iterator[Block]:
    """All tasks at a glance, the plot, then a table a task."""
    if not summary["accuracy"]:
        return
    yield Heading("Accuracy")
    yield Paragraph(
        "Every row had the budget of its softmax row: the same model, data, steps and learning rate of the weights. "
        "Mean ± standard deviation over seeds. Controls are not meant to be used: `average` is no attention at all, "
        "`band` a window alone. A row that is no better than a control has not shown that it attends. The error is "
        "that of the attention's outputs relative to softmax's, mean over layers, before and after training. " + DROPOUT
    )
    yield overview_table(summary)
    yield from map(Paragraph, not_learnt(summary))
    yield from stages(summary)
    if figure := pareto(summary):
        yield Image("pareto.png", "Accuracy against training speed, a panel a task", lambda: figure)
    for table in summary["accuracy"]:
        yield Heading(title_of(table, summary["accuracy"]), 3)
        yield from _task(table)


def overview_table(summary: Mapping[str, Any]) -> Table:
    """A column a task, and the mean share of softmax's score; of a loss, how many times softmax's it is."""
    tables = summary["accuracy"]
    rows = []
    shared = _has_shares(summary)
    for each in summary["overview"]:
        cells = []
        for table in tables:
            row = _row_of(table, each["row"])
            cells.append(DASH if row is None else score(row["metric"], table["scale"]))
            if row and not row["learnt"]:
                cells[-1] += " (chance)"
            if row and table["lower_is_better"] and row["over_softmax"]:
                cells[-1] += f" ({row['over_softmax']:.3f} ×)"
        share = [percent(each["mean_share_of_softmax"])] if shared else []
        rows.append([each["row"], *cells, *share, each["control"] or ""])
    columns = [f"{title_of(table, tables)}: {metric_name(table)}" for table in tables]
    kinds = [kind(each["attention"], each["control"]) for each in summary["overview"]]
    share = ["mean share of softmax's score"] if shared else []
    return Table("", ["attention", *columns, *share, ""], rows, kinds)


def not_learnt(summary: Mapping[str, Any]) -> Iterator[str]:
    """Which tasks softmax has not learnt, and what "(chance)" means."""
    tables = summary["accuracy"]
    for table in tables:
        if not table["learnt"]:
            chance = score({"mean": table["chance"], "spread": None}, table["scale"])
            yield (
                f"{title_of(table, tables)} was not learnt: softmax is not above chance ({chance}) by more than two "
                f"standard errors. Its scores say nothing about attention and do not count in the mean shares."
            )
    if any(not row["learnt"] for table in tables for row in table["rows"]):
        yield "(chance): not above chance by more than two standard errors, so the task was not learnt."


def row_options(summary: Mapping[str, Any]) -> str:
    """What each row is, where its name does not say it; with the tasks where that differs."""
    told = []
    for each in summary["overview"]:
        by_options: dict[str, list[str]] = {}
        for table in summary["accuracy"]:
            if row := _row_of(table, each["row"]):
                by_options.setdefault(row["attention"], []).append(title_of(table, summary["accuracy"]))
        if list(by_options) != [each["row"]]:
            several = len(by_options) > 1
            said = [f"{o} ({', '.join(parts)})" if several else o for o, parts in by_options.items()]
            told.append(f"`{each['row']}` is {' and '.join(said)}")
    return f"Options that are not the default: {'; '.join(told)}." if told else ""


def stages(summary: Mapping[str, Any]) -> Iterator[Block]:
    """What each step buys, where runs were evaluated before training too."""
    tables = [table for table in summary["accuracy"] if any(_first_look(row) for row in table["rows"])]
    if not tables:
        return
    shared = _has_shares(summary)
    rows = []
    for each in summary["overview"]:
        cells = []
        for table in tables:
            row = _row_of(table, each["row"])
            steps = [] if row is None else [*row["stages"].values(), row["metric"]]
            shown = [score({**step, "spread": None}, table["scale"]) for step in steps if step["mean"] is not None]
            cells.append(" → ".join(shown) or DASH)
        shares = [*each["mean_share_by_stage"].values(), each["mean_share_of_softmax"]] if shared else []
        rows.append([each["row"], *cells, *map(percent, shares)])
    columns = [f"{title_of(table, tables)}: {metric_name(table)}" for table in tables]
    kinds = [kind(each["attention"], each["control"]) for each in summary["overview"]]
    said = (
        "What each step buys: patched and not trained → after attention transfer, if its row has one → after "
        "fine-tuning too."
    )
    shares = []
    if shared:
        said += " The mean shares are of the scores of softmax, before its further training for the first two."
        shares = [f"mean share, {name}" for name in ("patched", "after transfer", "fine-tuned")]
    yield Paragraph(said)
    yield Table("", ["attention", *columns, *shares], rows, kinds)
    yield from _errors(summary["overview"], tables)


def _errors(overview: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    rows, kinds = [], []
    for each in overview:
        cells = []
        for table in tables:
            errors = (_row_of(table, each["row"]) or {}).get("attention_error") or {}
            steps = [errors.get(when) for when in ("before", "transferred", "after")]
            cells.append(" → ".join(f"{step:.2f}" for step in steps if step is not None) or DASH)
        if set(cells) != {DASH}:
            rows.append([each["row"], *cells])
            kinds.append(kind(each["attention"], each["control"]))
    if rows:
        yield Paragraph("The relative error of attention outputs against softmax at the same steps, mean over layers.")
        yield Table("", ["attention", *(title_of(table, tables) for table in tables)], rows, kinds)


def _row_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((row for row in table["rows"] if row["row"] == name), None)


def _has_shares(summary: Mapping[str, Any]) -> bool:
    return any(each["mean_share_of_softmax"] is not None for each in summary["overview"])


def _first_look(row: Mapping[str, Any]) -> bool:
    return any(value["mean"] is not None for value in row["stages"].values())


def title_of(table: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> str:
    """The task, with the length where it has several."""
    several = len({other["length"] for other in tables if other["part"] == table["part"]}) > 1
    return f"{table['part']}, {table['length']:,} tokens" if several else str(table["part"])


def budget_of(table: Mapping[str, Any]) -> str:
    """What was trained on what, for how long."""
    data = " ".join(filter(None, [table["dataset"]["name"], table["dataset"].get("config")]))
    unit = "tokens" if table["metric"] == "perplexity" else "examples"
    processes = f"; {table['processes']} processes" if table["processes"] > 1 else ""
    return (
        f"{table['model']} on {data}, {metric_name(table)} on {table['examples']:,} {unit} of "
        f"{table['dataset']['split']}; "
        + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in table["budget"].items())
        + f"{processes}."
    )


def _task(table: Mapping[str, Any]) -> Iterator[Block]:
    yield Paragraph(budget_of(table))
    share = "times softmax's" if table["lower_is_better"] else "share of softmax's"
    headings = [
        "attention", metric_name(table), share, "way from average to softmax", "samples/s", "error before",
        "error after", "seeds", "options", "",
    ]  # fmt: skip
    rows = []
    for row in table["rows"]:
        over = row["over_softmax"]
        errors = row["attention_error"] or {}
        rows.append(
            [
                row["row"],
                score(row["metric"], table["scale"]),
                "not learnt"
                if not row["learnt"]
                else f"{over:.3f} ×"
                if table["lower_is_better"] and over
                else percent(over),
                percent(row["from_average_to_softmax"]),
                rate(row["samples_per_second"]),
                *(f"{errors[when]:.2f}" if errors.get(when) is not None else DASH for when in ("before", "after")),
                ", ".join(map(str, row["seeds"])),
                row["attention"],
                row["control"] or "",
            ]
        )
    yield Table("", headings, rows, [kind(row["attention"], row["control"]) for row in table["rows"]])


def speed_of(summary: Mapping[str, Any]) -> Iterator[Block]:
    """Training, by task, length and processes."""
    yield Heading("Training speed and memory")
    entries = summary["speed"]
    yield Paragraph(
        "Steps of training alone, without the first three. Memory is the peak of the largest process. Scaling is the "
        "speed of all processes over as many times that of one with the same number of threads (100 % is perfect)."
    )
    headings = ["attention", "length", "processes", "samples/s", "tokens/s", "over softmax", "scaling", "peak memory"]
    for part, model, where in dict.fromkeys((each["part"], each["model"], each["machine"]) for each in entries):
        found = [each for each in entries if (each["part"], each["model"], each["machine"]) == (part, model, where)]
        rows = [
            [
                each["row"],
                f"{each['length']:,}",
                str(each["processes"]),
                rate(each["samples_per_second"]),
                rate(each["tokens_per_second"]),
                f"{each['over_softmax']:.2f} ×" if each["over_softmax"] else DASH,
                percent(each["efficiency"]) if each["processes"] > 1 else DASH,
                in_bytes(each["peak_memory_bytes"]) if each["peak_memory_bytes"] else DASH,
            ]
            for each in found
        ]
        kinds = [kind(each["attention"], each["control"]) for each in found]
        yield Table(f"{part}: {model}, {where} a process", headings, rows, kinds)
    if figure := crossover(summary):
        yield Image(
            "crossover.png",
            "Tokens a second in training by length; rings mark where a row equals softmax",
            lambda: figure,
        )
    if summary["crossovers"]:
        said = [f"{each['row']} ({each['part']}) {crossing(each)}" for each in summary["crossovers"]]
        yield Paragraph(f"Trains faster than softmax: {'; '.join(said)}.")


def crossing(each: Mapping[str, Any]) -> str:
    if each["length"] is None:
        return f"at no length up to {max(each['lengths']):,}"
    if each["interpolated"] is None:
        return f"from {each['length']:,} tokens on, the shortest length measured"
    return f"from about {each['interpolated']:,} tokens on (measured: {each['length']:,} and longer)"


def origin(summary: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("How it was made")
    commits = [
        (each["commit"] or "a commit that was not recorded") + (" with uncommitted changes" if each["changed"] else "")
        for each in summary["commits"]
    ]
    versions = [", ".join(f"{k} {v}" for k, v in each.items() if v) for each in summary["versions"]]
    yield Paragraph(
        f"From {len(summary['files'])} result files and nothing else. On {' and '.join(summary['machines'])} a "
        f"process; hf_rfattn at {', '.join(commits)}; {'; or '.join(versions)}."
    )


def metric_name(table: Mapping[str, Any]) -> str:
    return str(table["metric"]).replace("_", " ")


def kind(attention: str, control: str | None) -> str:
    if attention == SOFTMAX:
        return SOFTMAX
    return "control" if control in CONTROLS else ""


def score(value: Mapping[str, Any], scale: float | None) -> str:
    """Scores in percent, others as they are."""
    factor = 100 / scale if scale else 1.0
    text = f"{factor * value['mean']:.1f}" if scale else number(value["mean"])
    if value["spread"] is None:
        return text
    return f"{text} ± {factor * value['spread']:.1f}" if scale else f"{text} ± {number(value['spread'], 2)}"


def rate(value: Mapping[str, Any]) -> str:
    if value["mean"] is None:
        return DASH
    text = number(value["mean"], 3)
    return text if value["spread"] is None else f"{text} ± {number(value['spread'], 2)}"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"
