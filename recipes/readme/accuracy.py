"""The accuracy part, out of the comparisons in recipes/results, and the pictures on top."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison.figures import pareto
from comparison.summary import KIND, summarise
from comparison.tables import DROPOUT, budget_of, not_learnt, overview_table, row_options, speed_of, stages, title_of

from hf_rfattn.results import Block, Heading, Image, Paragraph, Table, TaskResult, parse_result

from .pages import Documents, Page

# the folders of comparisons, and the commands that make them
COMPARISONS = {
    "accuracy": "make compare DATA=... MODELS=...",
    "transfer": "make compare CONFIG=transfer DATA=... MODELS=... ARGS='--set larger=...'",
    "language": "make compare CONFIG=language DATA=...",
    "stories": "make compare CONFIG=stories DATA=stories MODELS=...",
}
SHORT = ("transfer", "stories")  # an encoder on many tasks and a decoder that needs its attention
NOTHING = Paragraph("Nothing has been compared yet.")
PICTURES = {"crossover.png": "from which length on it pays", "pareto.png": "what it costs in accuracy"}


def whole(documents: Documents, page: Page) -> list[Block]:
    """Of each comparison: all tasks at a glance, what each step buys, accuracy against speed, speed alone."""
    return [block for name in COMPARISONS for block in comparison(name, documents, page)] or [NOTHING]


def short(documents: Documents, page: Page) -> list[Block]:
    """All tasks at a glance, of the comparisons that tell most."""
    blocks: list[Block] = []
    for name in SHORT:
        if summary := summary_of(name, documents):
            blocks += [
                Paragraph(f"**{summary['title']}**, on {' and '.join(summary['machines'])} a process:"),
                overview_table(summary),
                *map(Paragraph, not_learnt(summary)),
                *([Paragraph(options)] if (options := row_options(summary)) else []),
            ]
    return blocks or [NOTHING]


def pictures(documents: Documents, page: Page) -> list[Block]:
    """From which length on it pays, and what it costs in accuracy."""
    summary = summary_of("accuracy", documents)
    images = [block for block in comparison("accuracy", documents, page) if isinstance(block, Image)]
    if summary is None or not images:
        return [NOTHING]
    judged = [each["model"] for each in summary["accuracy"]]
    crossing = {each["part"] for each in summary["crossovers"]}
    timed = [f"{each['model']}, {each['machine']}" for each in summary["speed"] if each["part"] in crossing]
    shown = sorted(images, key=lambda image: list(PICTURES).index(Path(image.name).name))
    row = [f"![{image.what}]({page.address(image.name)})" for image in shown]
    said = (
        f"Left: {' and '.join(dict.fromkeys(timed))}, in training. Right: "
        f"{' and '.join(dict.fromkeys(judged))}, fine-tuned on short inputs and without attention transfer. What "
        "transfer wins back stands under [accuracy](#accuracy), what longer inputs gain under [speed](#speed)."
    )
    return [Table("", [PICTURES[Path(image.name).name] for image in shown], [row], aligned=False), Paragraph(said)]


def plots(documents: Documents) -> Iterator[tuple[Image, dict[str, Any]]]:
    """Those that the pages show, and what they are drawn from."""
    for name in COMPARISONS:
        for block in comparison(name, documents, Page("")):
            if isinstance(block, Image):
                yield block, summary_of(name, documents) or {}


def summary_of(name: str, documents: Documents) -> dict[str, Any] | None:
    parsed = [
        parse_result(document, file)
        for file, document in documents.items()
        if KIND in document and file.startswith(f"{name}/")
    ]
    results = [result for result in parsed if isinstance(result, TaskResult)]
    return summarise(results) if results else None


def comparison(name: str, documents: Documents, page: Page) -> Iterator[Block]:
    summary = summary_of(name, documents)
    if summary is None:
        return
    tables = summary["accuracy"]
    yield Heading(summary["title"], 3)
    yield Paragraph(
        f"Fine-tuned with each attention on {' and '.join(summary['machines'])} a process, every row with the budget "
        "of its softmax row; scores in %, mean ± standard deviation over seeds. `average` (no attention) and `band` (a "
        f"window alone) are controls. [All of it]({page.address(name)}), made by `{COMPARISONS[name]}`. {DROPOUT}"
    )
    yield overview_table(summary)
    yield from map(Paragraph, not_learnt(summary))
    if options := row_options(summary):
        yield Paragraph(options)
    yield from stages(summary)
    yield Paragraph("\n".join(f"- {title_of(each, tables)}: {budget_of(each)}" for each in tables))
    judged = {each["part"] for each in tables}
    timed = {**summary, "speed": [entry for entry in summary["speed"] if entry["part"] not in judged]}
    if not timed["speed"]:
        return
    if figure := pareto(summary):
        yield Image(f"{name}/pareto.png", "Accuracy against training speed, a panel a task", lambda: figure)
    for block in speed_of(timed):
        if isinstance(block, Image):
            yield replace(block, name=f"{name}/{block.name}")
        elif not isinstance(block, Heading):
            yield block
