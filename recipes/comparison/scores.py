"""Scores and speed of results that can be compared, as tables, a plot and a report. Made from result files alone."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hf_rfattn import attention_label, mechanism_names_in
from hf_rfattn.results import (
    CONTROLS,
    DASH,
    SOFTMAX,
    STAGES,
    Block,
    Heading,
    Image,
    Metric,
    Paragraph,
    Result,
    Table,
    as_html,
    as_markdown,
    control_of,
    in_bytes,
    number,
    read_results,
    times,
    write_images,
)
from hf_rfattn.results.plots import line_style, title_and_legend

PLACE = "comparison"  # the field that says where a result of a comparison belongs
CHANCE = {"sst2": 0.5, "rte": 0.5, "snli": 1 / 3, "cola": 0.0, "stsb": 0.0}  # of results that did not record it
INTRODUCTION = (
    "All rows of a task have the same budget: model, data, steps and learning rate. Scores are mean ± standard "
    "deviation over seeds; (chance) marks scores that are not more than two standard errors above the best constant "
    "answer. The controls are `average` (no attention) and `band` (a window alone): rows that do not beat them show no "
    "benefit from attention. Errors are those of attention outputs relative to softmax, mean over layers: untrained → "
    "after attention transfer → after training. Only the softmax rows use attention dropout."
)

Spread = tuple[float, float | None]  # mean and standard deviation over seeds, None for a single one


def over_seeds(values: Iterable[float | None]) -> Spread | None:
    """
    >>> over_seeds([1.0, 3.0]), over_seeds([2.0]), over_seeds([None])
    ((2.0, 1.4142135623730951), (2.0, None), None)
    """
    known = [value for value in values if value is not None]
    return (statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None) if known else None


@dataclass(frozen=True)
class Row:
    """One attention: a run for each seed, beside those of softmax."""

    label: str
    runs: list[Result]
    softmax: list[Result]
    control: str | None

    @property
    def attention(self) -> str:
        return attention_label(self.runs[0].attention)

    @property
    def score(self) -> Spread:
        return over_seeds(run.score.value for run in self.runs) or (0.0, None)

    @property
    def learnt(self) -> bool:
        return metric_of(self.runs[0]).beats_chance(self.score[0])

    @property
    def over_softmax(self) -> float | None:
        """Its score over that of softmax, unless a constant answer has that score, too."""
        base = over_seeds(run.score.value for run in self.softmax)
        learnt = base and metric_of(self.softmax[0]).beats_chance(base[0])
        return self.score[0] / base[0] if base and learnt else None

    @property
    def speed(self) -> Spread | None:
        return over_seeds(run.samples_per_second for run in self.runs)

    @property
    def speed_over_softmax(self) -> float | None:
        base = over_seeds(run.samples_per_second for run in self.softmax)
        return self.speed[0] / base[0] if self.speed and base else None

    def at(self, stage: str) -> Spread | None:
        """The score that was recorded at a stage before training."""
        history = [(run, entry) for run in self.runs for entry in run.document.get("history", ())]
        found = [entry["metrics"][run.main_metric]["value"] for run, entry in history if entry.get("stage") == stage]
        return over_seeds(found)

    @property
    def errors(self) -> list[float]:
        """Of attention outputs, mean over layers and seeds: before, after attention transfer, after training."""
        found: dict[str, list[float]] = {"before": [], "transferred": [], "after": []}
        for run in self.runs:
            errors, taught = run.document.get("attention_error") or {}, run.document.get("transfer")
            layers = {when: each["overall"] for when, each in errors.items() if each}
            layers |= {"transferred": taught["error"]["after"]} if taught and errors else {}
            for when, values in layers.items():
                found[when].append(statistics.mean(values))
        return [statistics.mean(values) for values in found.values() if len(values) == len(self.runs)]


@dataclass(frozen=True)
class ScoreTable:
    """Rows with one task, model, data and budget: softmax first, controls last."""

    title: str
    rows: list[Row]

    @property
    def first(self) -> Result:
        return self.rows[0].runs[0]

    @property
    def metric(self) -> Metric:
        return metric_of(self.first)

    @property
    def metric_name(self) -> str:
        return self.first.main_metric.replace("_", " ") + (" (%)" if self.metric.scale else "")

    @property
    def learnt(self) -> bool:
        return self.rows[0].over_softmax is not None

    @property
    def budget(self) -> str:
        """What was trained on what, for how long."""
        first, unit = self.first, "examples" if self.metric.scale else "tokens"
        data = " ".join(filter(None, [first.dataset["name"], first.dataset.get("config")]))
        budget = "".join(f", {name.replace('_', ' ')} {value}" for name, value in first.budget.items())
        seeds = sorted({run.seed for row in self.rows for run in row.runs})
        return (
            f"{first.model} on {data}, {self.metric.n:,} {unit} of {first.dataset['split']}{budget}; "
            f"seeds {', '.join(map(str, seeds))}; {first.machine}, torch {first.versions['torch']}"
        )


def metric_of(run: Result) -> Metric:
    known = run.score.chance is not None or not run.score.scale
    return run.score if known else replace(run.score, chance=CHANCE.get(run.task))


def make_tables(
    results: Iterable[Result], title: Callable[[Result], str], label: Callable[[Result], str]
) -> list[ScoreTable]:
    """A table for each title, task, model, data and budget."""
    groups: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        groups.setdefault((title(result), result.measured_on), {}).setdefault(label(result), []).append(result)
    tables = []
    for (name, _), rows in groups.items():
        mechanisms = {row: _mechanisms(runs[0].attention) for row, runs in rows.items()}
        softmax = next((runs for runs in rows.values() if runs[0].attention == SOFTMAX), [])
        made = [Row(n, runs, softmax, control_of(mechanisms[n], mechanisms.values())) for n, runs in rows.items()]
        made.sort(key=lambda row: -1 if row.runs is softmax else row.control in CONTROLS)
        tables.append(ScoreTable(name, made))
    return tables


def _mechanisms(attention: Any) -> list[str]:
    return [] if "layers" in attention else mechanism_names_in(attention)


def comparison_tables(results: Iterable[Result]) -> list[ScoreTable]:
    """Those of the results of a comparison, in the order of its file."""

    def title(run: Result) -> str:
        processes = run.document["processes"]
        return run.document[PLACE]["part"] + (f", {processes} processes" if processes > 1 else "")

    placed = [run for run in results if run.kind == "task" and PLACE in run.document]
    placed.sort(key=lambda run: (run.document[PLACE]["order"], run.budget["max_length"], run.document["processes"]))
    tables = make_tables(placed, title, lambda run: run.document[PLACE]["row"])
    titles = [table.title for table in tables]
    lengths = [table.first.budget["max_length"] for table in tables]
    return [
        replace(table, title=f"{name}, {length:,} tokens") if titles.count(name) > 1 else table
        for table, name, length in zip(tables, titles, lengths, strict=True)
    ]


def read_comparison(folder: Path) -> tuple[str, list[ScoreTable]]:
    """Title and tables of the comparison whose results a folder holds."""
    tables = comparison_tables(read_results(folder))
    if not tables:
        raise ValueError(f"{folder} holds no results of a comparison.")
    return tables[0].first.document[PLACE]["title"], tables


def overview(tables: Sequence[ScoreTable]) -> Table:
    """A row for each attention, a column for each task, and the mean share of softmax's score.

    The mean is over tasks that softmax has learnt, of rows that are in all of them; losses do not count.
    """
    found: dict[str, list[Row | None]] = {}
    for table in tables:
        for row in table.rows:
            found[row.label] = [next((r for r in t.rows if r.label == row.label), None) for t in tables]
    counted = [table.learnt and not table.metric.lower_is_better for table in tables]
    lines = []
    for label, rows in found.items():
        there = [row for row in rows if row]
        shares = [row and row.over_softmax for row, counts in zip(rows, counted, strict=True) if counts]
        mean = percent(statistics.mean(shares) if None not in shares else None) if shares else DASH  # type: ignore[type-var]
        control = next((row.control for row in there if row.control), "")
        lines.append([label, *(score_text(row) if row else DASH for row in rows), mean, control])
    headings = [f"{table.title}: {table.metric_name}" for table in tables]
    lines.sort(key=lambda line: line[-1] in CONTROLS)
    return without_empty(["attention", *headings, "mean share of softmax's score", ""], lines)


def options_of(tables: Sequence[ScoreTable]) -> Paragraph:
    """Which attention the labels of rows stand for."""
    rows = {(row.label, row.attention): None for table in tables for row in table.rows if row.label != row.attention}
    return Paragraph("Options: " + ("; ".join(f"{label} is `{name}`" for label, name in rows) or "defaults") + ".")


def run_speed(row: Row) -> dict[str, str]:
    """As the runs measured it."""
    memory = max(run.peak_memory_bytes or 0 for run in row.runs)
    return {
        "samples/s": spread_text(row.speed),
        "over softmax": times(row.speed_over_softmax),
        "peak memory": in_bytes(memory) if memory else DASH,
    }


def details(table: ScoreTable, speed: Callable[[Row], dict[str, str]] = run_speed) -> Table:
    """Score, speed and memory in one row for each attention. `speed`: its cells, by heading."""
    rows = []
    for row in table.rows:
        over = row.over_softmax
        share = f"{over:.3f} ×" if over and table.metric.lower_is_better else percent(over)
        rows.append(
            {
                "attention": row.label,
                **{stage: spread_text(row.at(stage), 4, table.metric.scale) for stage in STAGES},
                table.metric_name: score_text(row),
                "of softmax": share,
                **speed(row),
                "error": " → ".join(f"{error:.2f}" for error in row.errors) or DASH,
            }
        )
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    return without_empty(headings, [[row.get(heading, DASH) for heading in headings] for row in rows])


def without_empty(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns in which nothing was measured."""
    kept = [i for i in range(len(headings)) if any(row[i] != DASH for row in rows)]
    return Table("", [headings[i] for i in kept], [[row[i] for i in kept] for row in rows])


def write_report(title: str, tables: Sequence[ScoreTable], folder: Path) -> list[Path]:
    """report.html, and report.md with its plot."""
    blocks: list[Block] = [Heading(title, 1), Paragraph(INTRODUCTION), overview(tables), options_of(tables)]
    if figure := score_and_speed(tables):
        blocks.append(Image("pareto.png", "Score against speed, one panel per task", lambda: figure))
    for table in tables:
        blocks += [Heading(table.title), Paragraph(f"{table.budget}."), details(table)]
    write_images(blocks, folder)
    (folder / "report.md").write_text(as_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(as_html(title, blocks), encoding="utf-8")
    return [folder / "report.html", folder / "report.md"]


def score_and_speed(tables: Sequence[ScoreTable]) -> Figure | None:
    """A panel per task: its score against throughput. No row beats those on the line in both."""
    tables = [table for table in tables if sum(row.speed is not None for row in table.rows) > 1]
    if not tables:
        return None
    columns = min(3, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.6, 4.2 * lines + 0.7), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, table in zip(panels, tables, strict=False):
        unit, sign = 100 / (table.metric.scale or 100), -1 if table.metric.lower_is_better else 1
        points, seen = [], set()
        for row in table.rows:
            if row.speed:
                (score, spread), (speed, deviation) = row.score, row.speed
                mechanism = next(iter(mechanism_names_in(row.runs[0].attention)), SOFTMAX)
                style = {**line_style(mechanism), "linestyle": "none", "markersize": 8, "elinewidth": 0.8, "capsize": 2}
                style |= {"fillstyle": "none"} if mechanism in seen else {}  # a further row of this mechanism
                label = f"{row.label} (control)" if row.control in CONTROLS else row.label
                axes.errorbar(speed, unit * score, unit * spread if spread else None, deviation, label=label, **style)
                points.append((speed, sign * unit * score))
                seen.add(mechanism)
        front = sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points))
        axes.plot([x for x, _ in front], [sign * y for _, y in front], color="black", alpha=0.25, lw=4, zorder=0)
        if sign < 0:
            axes.invert_yaxis()
        axes.margins(0.12)
        axes.grid(alpha=0.3)
        axes.set(title=table.title, xlabel="samples per second", ylabel=table.metric_name)
    for axes in panels[len(tables) :]:
        axes.remove()
    title_and_legend(figure, "Score and speed")
    return figure


def score_text(row: Row) -> str:
    return spread_text(row.score, 4, row.runs[0].score.scale) + ("" if row.learnt else " (chance)")


def spread_text(value: Spread | None, digits: int = 3, scale: float | None = None) -> str:
    """Mean ± standard deviation; with the perfect score as `scale`, in percent.

    >>> spread_text((0.8, 0.0123), scale=1), spread_text((1234.5, None)), spread_text(None)
    ('80.0 ± 1.2', '1,230', '–')
    """
    if value is None:
        return DASH
    mean, spread = value
    if scale:
        return f"{100 * mean / scale:.1f}" + ("" if spread is None else f" ± {100 * spread / scale:.1f}")
    return number(mean, digits) + ("" if spread is None else f" ± {number(spread, 2)}")


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"
