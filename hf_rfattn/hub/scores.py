"""Tables and a plot of score, speed and memory for cards, comparisons and the README, from comparable results."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..mechanisms.naming import attention_label, mechanism_names_in
from ..results.report import DASH, Table, in_bytes, number, times
from ..results.schema import CONTROLS, SOFTMAX, STAGES, Metric, Result, control_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Spread = tuple[float, float | None]  # mean and standard deviation over seeds, None for a single seed
METRIC_NAMES = {
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "ndcg_at_10": "nDCG@10",
    "spearmanr": "Spearman correlation",
}


@dataclass(frozen=True)
class Row:
    """One attention, with a run per seed. Ratios to softmax are None if softmax was not measured or is at chance."""

    label: str
    runs: list[Result]
    control: str | None
    score: Spread
    learnt: bool  # clearly better than the best constant answer
    over_softmax: float | None
    speed: Spread | None  # samples per second
    speed_over_softmax: float | None

    @property
    def attention(self) -> str:
        return attention_label(self.runs[0].attention)


@dataclass(frozen=True)
class ScoreTable:
    """Rows of the same task, model, data and budget; softmax first, controls last."""

    title: str
    metric: Metric
    rows: list[Row]

    @property
    def first(self) -> Result:
        return self.rows[0].runs[0]

    @property
    def metric_name(self) -> str:
        name = self.first.main_metric
        return METRIC_NAMES.get(name, name.replace("_", " ")) + (" (%)" if self.metric.scale else "")

    @property
    def budget(self) -> str:
        """Model, data, training budget, seeds and machine."""
        first, unit = self.first, "examples" if self.metric.scale else "tokens"
        data = " ".join(filter(None, [first.dataset["name"], first.dataset.get("config")]))
        budget = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in first.budget.items())
        seeds = sorted({run.seed for row in self.rows for run in row.runs})
        error = ""
        if first.main_metric == "accuracy" and self.metric.scale:
            share = self.metric.value / self.metric.scale
            error = f" (standard error {100 * math.sqrt(share * (1 - share) / self.metric.n):.1f})"
        return (
            f"{first.model} on {data}, {self.metric.n:,} {unit} of {first.dataset['split']}"
            f"{error}; {budget}; "
            f"seeds {', '.join(map(str, seeds))}; {first.machine}, torch {first.versions['torch']}"
        )


def over_seeds(values: Iterable[float | None]) -> Spread | None:
    """
    >>> over_seeds([1.0, 3.0]), over_seeds([2.0]), over_seeds([None])
    ((2.0, 1.4142135623730951), (2.0, None), None)
    """
    known = [value for value in values if value is not None]
    return (statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None) if known else None


def label_of(result: Result) -> str:
    """The attention of a result, and whether it went through attention transfer."""
    steps = (result.document.get("transfer") or {}).get("steps")
    return attention_label(result.attention) + (f", after {steps} steps of transfer" if steps else "")


def make_tables(
    results: Iterable[Result], title: Callable[[Result], str], label: Callable[[Result], str] = label_of
) -> list[ScoreTable]:
    """Group results into one table per title, task, model, data and budget, with one row per label."""
    groups: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        groups.setdefault((title(result), result.measured_on), {}).setdefault(label(result), []).append(result)
    return [ScoreTable(name, *_rows(rows)) for (name, _), rows in groups.items()]


def _rows(found: dict[str, list[Result]]) -> tuple[Metric, list[Row]]:
    softmax = next((runs for runs in found.values() if runs[0].attention == SOFTMAX), [])
    first = (softmax or next(iter(found.values())))[0]
    metric = first.score
    score = over_seeds(run.score.value for run in softmax)
    if score and not metric.beats_chance(score[0]):
        score = None
    speed = over_seeds(run.samples_per_second for run in softmax)
    mixed = {label: "layers" in runs[0].attention for label, runs in found.items()}
    names = {n: [] if mixed[n] else mechanism_names_in(runs[0].attention) for n, runs in found.items()}
    rows = []
    for label, runs in found.items():
        own, fast = over_seeds(run.score.value for run in runs), over_seeds(run.samples_per_second for run in runs)
        learnt, control = metric.beats_chance(own[0]), control_of(names[label], names.values())  # type: ignore[index]
        rows.append(Row(label, runs, control, own, learnt, _ratio(own, score), fast, _ratio(fast, speed)))  # type: ignore[arg-type]
    return metric, sorted(rows, key=lambda row: -1 if row.runs is softmax else row.control in CONTROLS)


def _ratio(own: Spread | None, base: Spread | None) -> float | None:
    return own[0] / base[0] if own and base else None


def overview(tables: Sequence[ScoreTable]) -> Table:
    """One row per attention, one column per task, and the mean share of softmax's score.

    The mean is over the tasks in which softmax is above chance, for rows that appear in all of them; metrics where
    lower is better are left out.
    """
    lines = []
    for label in dict.fromkeys(row.label for table in tables for row in table.rows):
        rows = [next((row for row in table.rows if row.label == label), None) for table in tables]
        counted = [t.rows[0].over_softmax is not None and not t.metric.lower_is_better for t in tables]
        shares = [row.over_softmax if row else None for row, counts in zip(rows, counted, strict=True) if counts]
        known = [share for share in shares if share is not None]
        mean = statistics.mean(known) if known and len(known) == len(shares) else None
        control = next((row.control for row in rows if row and row.control), "")
        lines.append([label, *(score_text(row) if row else DASH for row in rows), percent(mean), control])
    lines.sort(key=lambda line: line[-1] in CONTROLS)
    headings = [f"{table.title}: {table.metric_name}" for table in tables]
    return without_empty(["attention", *headings, "mean share of softmax's score", ""], lines)


def run_speed(table: ScoreTable, row: Row) -> dict[str, str]:
    """Speed and memory measured by the runs themselves."""
    memory = max(run.peak_memory_bytes or 0 for run in row.runs)
    return {
        "samples/s": spread_text(row.speed),
        "over softmax": times(row.speed_over_softmax),
        "peak memory": in_bytes(memory) if memory else DASH,
    }


def details(table: ScoreTable, speed: Callable[[ScoreTable, Row], dict[str, str]] = run_speed) -> Table:
    """One row per attention with score, speed and memory. `speed` returns the speed cells of a row by heading."""
    rows = []
    for row in table.rows:
        over = row.over_softmax
        rows.append(
            {
                "attention": row.label,
                **{stage: spread_text(over_seeds(_at(stage, row)), 4, table.metric.scale) for stage in STAGES},
                table.metric_name: score_text(row),
                "of softmax": f"{over:.3f} ×" if over and table.metric.lower_is_better else percent(over),
                **speed(table, row),
                "error": " → ".join(f"{error:.2f}" for error in _errors(row)) or DASH,
            }
        )
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    return without_empty(headings, [[row.get(heading, DASH) for heading in headings] for row in rows])


def _at(stage: str, row: Row) -> Iterator[float]:
    """Scores recorded at a stage before training."""
    for run in row.runs:
        for entry in run.document.get("history", ()):
            if entry.get("stage") == stage:
                yield entry["metrics"][run.main_metric]["value"]


def _errors(row: Row) -> list[float]:
    """Errors of attention outputs, mean over layers and seeds: before, after attention transfer, after training."""
    found: dict[str, list[float]] = {"before": [], "transferred": [], "after": []}
    for run in row.runs:
        errors, taught = run.document.get("attention_error") or {}, run.document.get("transfer")
        layers = {when: each["overall"] for when, each in errors.items() if each}
        layers |= {"transferred": taught["error"]["after"]} if taught and errors else {}
        for when, values in layers.items():
            found[when].append(statistics.mean(values))
    return [statistics.mean(values) for values in found.values() if len(values) == len(row.runs)]


def without_empty(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table without empty columns."""
    kept = [i for i in range(len(headings)) if any(row[i] != DASH for row in rows)]
    return Table("", [headings[i] for i in kept], [[row[i] for i in kept] for row in rows])


def score_text(row: Row) -> str:
    return spread_text(row.score, 4, row.runs[0].score.scale) + ("" if row.learnt else " (chance)")


def spread_text(value: Spread | None, digits: int = 3, scale: float | None = None) -> str:
    """Format mean ± standard deviation; in percent of `scale`, the perfect score, if given.

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


def score_and_speed(tables: Sequence[ScoreTable], relative: bool = False) -> "Figure | None":
    """Plot score against throughput, or both `relative` to softmax, in one panel per task. Further rows of the same
    mechanism have hollow markers.
    """
    from matplotlib.figure import Figure

    from ..results.plots import line_style, title_and_legend

    tables = [table for table in tables if sum(row.speed is not None for row in table.rows) > 1]
    if not tables:
        return None
    columns = min(3, len(tables))
    lines = -(-len(tables) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.6, 4.2 * lines + 0.7), layout="constrained")
    for i, table in enumerate(tables):
        shared = figure.axes[0] if relative and i else None
        axes, seen = figure.add_subplot(lines, columns, i + 1, sharey=shared), set()
        unit = 100 if relative else 100 / (table.metric.scale or 100)
        for row in table.rows:
            if row.speed:
                (score, spread), (speed, deviation) = row.score, row.speed
                if relative:
                    score, speed = row.over_softmax or math.nan, row.speed_over_softmax or math.nan
                    spread = deviation = None
                mechanism = next(iter(mechanism_names_in(row.runs[0].attention)), SOFTMAX)
                style = {**line_style(mechanism), "linestyle": "none", "markersize": 8, "elinewidth": 0.8, "capsize": 2}
                style["fillstyle"] = "none" if mechanism in seen else "full"
                label = f"{row.label} (control)" if row.control in CONTROLS else row.label
                axes.errorbar(speed, unit * score, unit * spread if spread else None, deviation, label=label, **style)
                seen.add(mechanism)
        axes.margins(0.12)
        axes.grid(alpha=0.3)
        names = ("speed-up over softmax", f"% of softmax's {table.metric_name.removesuffix(' (%)')}")
        xlabel, ylabel = names if relative else ("samples per second", table.metric_name)
        axes.set(title=table.title, xlabel=xlabel, ylabel=ylabel)
        axes.yaxis.set_inverted(table.metric.lower_is_better)
    title_and_legend(figure, "Score and speed: best at the top right")
    return figure
