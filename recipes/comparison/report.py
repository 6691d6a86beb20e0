"""Generates the report of a comparison from its result files."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hf_rfattn.hub.scores import ScoreTable, details, make_tables, overview, score_and_speed
from hf_rfattn.results.report import Block, Image, as_html, as_markdown, write_images
from hf_rfattn.results.schema import Result, read_results

PLACE = "comparison"  # field of a result with its place in the comparison
INTRODUCTION = (
    "All rows of a task have the same budget: model, data, steps and learning rate. Scores are mean ± standard "
    "deviation over seeds; (chance) marks scores that are not more than two standard errors above the best constant "
    "answer. The controls are `average` (no attention) and `band` (a window alone): rows that do not beat them show no "
    "benefit from attention. Errors are relative errors of attention outputs against softmax, mean over layers: "
    "untrained → after attention transfer → after training. Only the softmax rows use attention dropout."
)


def comparison_tables(results: Iterable[Result]) -> list[ScoreTable]:
    """Tables of the results that belong to a comparison, in the order of its YAML file."""
    placed = [result for result in results if PLACE in result.document]
    placed.sort(key=lambda run: (run.document[PLACE]["order"], run.budget.get("max_length") or 0, run.seed))
    tables = make_tables(placed, lambda run: run.document[PLACE]["part"], lambda run: run.document[PLACE]["row"])
    titles = [table.title for table in tables]
    return [
        replace(table, title=f"{table.title}, {table.first.budget['max_length']:,} tokens")
        if titles.count(table.title) > 1
        else table
        for table in tables
    ]


def read_comparison(folder: Path) -> tuple[str, list[ScoreTable]]:
    """Return title and tables of the comparison with results in a folder."""
    tables = comparison_tables(read_results(folder))
    if not tables:
        raise ValueError(
            f"{folder} contains no results of a comparison. Run the comparison with --output {folder} first."
        )
    return tables[0].first.document[PLACE]["title"], tables


def options_of(tables: Sequence[ScoreTable]) -> str:
    """A sentence with the options of the mechanism of each row, by task if they differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for table in tables:
        for row in table.rows:
            if row.label != row.attention:
                found.setdefault(row.label, {}).setdefault(row.attention, []).append(table.title)
    sentences = [
        f"{label} is "
        + " and ".join(f"`{name}`" + f" ({', '.join(of)})" * (len(names) > 1) for name, of in names.items())
        for label, names in found.items()
    ]
    return "Options: " + ("; ".join(sentences) or "defaults") + "."


def write_report(title: str, tables: Sequence[ScoreTable], folder: Path) -> list[Path]:
    """Write report.html and report.md with its plot, and return their paths."""
    blocks: list[Block] = [f"# {title}", INTRODUCTION, overview(tables), options_of(tables)]
    if figure := score_and_speed(tables):
        blocks.append(Image("pareto.png", "Score against speed, one panel per task", lambda: figure))
    for table in tables:
        blocks += [f"## {table.title}", f"{table.budget}.", details(table)]
    write_images(blocks, folder)
    (folder / "report.md").write_text(as_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(as_html(title, blocks), encoding="utf-8")
    return [folder / "report.html", folder / "report.md"]
