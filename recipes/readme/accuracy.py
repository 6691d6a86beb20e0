"""The accuracy part, out of the comparisons in recipes/results, and the pictures on top."""

from collections.abc import Iterator
from typing import Any

from comparison.figures import pareto
from comparison.summary import KIND, summarise
from comparison.tables import DROPOUT, budget_of, not_learnt, overview_table, row_options, speed_of, stages, title_of

from hf_rfattn.results import Block, Heading, Image, Paragraph, TaskResult, as_markdown, parse_result

from .markdown import Documents, Page, table

# the folders of comparisons, and the commands that make them
COMPARISONS = {
    "accuracy": "make compare DATA=... MODELS=...",
    "transfer": "make compare CONFIG=transfer DATA=... MODELS=... ARGS='--set larger=...'",
    "language": "make compare CONFIG=language DATA=...",
    "stories": "make compare CONFIG=stories DATA=stories MODELS=...",
}
SHORT = ("transfer", "stories")  # an encoder on many tasks and a decoder that needs its attention
NOTHING = "Nothing has been compared yet."
PICTURES = {"crossover.png": "from which length on it pays", "pareto.png": "what it costs in accuracy"}


def whole(documents: Documents, page: Page) -> str:
    """Of each comparison: all tasks at a glance, what each step buys, accuracy against speed, speed alone."""
    found = [
        as_markdown(blocks, lambda image, name=name: page.address(f"{name}/{image}"))
        for name in COMPARISONS
        if (blocks := list(comparison(name, documents, page)))
    ]
    return "\n".join(found) or NOTHING


def short(documents: Documents, page: Page) -> str:
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
    return as_markdown(blocks) if blocks else NOTHING


def pictures(documents: Documents, page: Page) -> str:
    """From which length on it pays, and what it costs in accuracy."""
    summary = summary_of("accuracy", documents)
    images = [block for block in comparison("accuracy", documents, page) if isinstance(block, Image)]
    if summary is None or not images:
        return NOTHING
    judged = [each["model"] for each in summary["accuracy"]]
    crossing = {each["part"] for each in summary["crossovers"]}
    timed = [f"{each['model']}, {each['machine']}" for each in summary["speed"] if each["part"] in crossing]
    shown = sorted(images, key=lambda image: list(PICTURES).index(image.name))
    return "\n".join(
        [
            table(
                [PICTURES[image.name] for image in shown],
                [[f"![{image.what}]({page.address(f'accuracy/{image.name}')})" for image in shown]],
            ),
            "",
            f"Left: {' and '.join(dict.fromkeys(timed))}, in training. Right: "
            f"{' and '.join(dict.fromkeys(judged))}, fine-tuned on short inputs and without attention transfer. What "
            "transfer wins back stands under [accuracy](#accuracy), what longer inputs gain under [speed](#speed).",
        ]
    )


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
        yield Image("pareto.png", "Accuracy against training speed, a panel a task", lambda: figure)
    yield from (block for block in speed_of(timed) if not isinstance(block, Heading))
