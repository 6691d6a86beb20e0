"""What the results of a comparison say, as one JSON document. Tables and plots are made from it and nothing else."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.metrics import GLUE

from hf_rfattn import attention_label, mechanism_names_in
from hf_rfattn.results import (
    CONTROLS,
    NO_ATTENTION,
    SCHEMA_VERSION,
    SOFTMAX,
    STAGES,
    Metric,
    TaskResult,
    control_of,
    measured_crossover,
    read_results,
)

KIND = "comparison"
WHEN = ("before", "transferred", "after")  # errors against softmax


@dataclass(frozen=True)
class Run:
    """A result and its place in the comparison."""

    result: TaskResult
    part: str
    row: str
    order: list[int]
    judged: bool
    length: int
    processes: int

    @classmethod
    def of(cls, result: TaskResult) -> "Run":
        place, length = result.document[KIND], int(result.budget["max_length"])
        processes = int(result.document["processes"])
        return cls(result, place["part"], place["row"], place["order"], place["accuracy"], length, processes)

    @property
    def machine(self) -> str:
        return self.result.machine

    @property
    def measured_on(self) -> str:
        return self.result.measured_on

    def identity(self, others: Iterable["Run"] = ()) -> dict[str, Any]:
        """What its attention is called, and what it is a control of beside others."""
        own, *rest = ([] if "layers" in r.result.attention else names_of(r) for r in (self, *others))
        return {
            "attention": attention_label(self.result.attention),
            "mechanism": next(iter(names_of(self)), SOFTMAX),
            "control": control_of(own, rest),
        }


def names_of(run: Run) -> list[str]:
    return mechanism_names_in(run.result.attention)


def read_summary(folder: Path) -> dict[str, Any]:
    """Of all results in a folder that have a place in a comparison."""
    results = [each for each in read_results(folder) if isinstance(each, TaskResult) and KIND in each.document]
    if not results:
        raise ValueError(f"{folder} holds no results of a comparison.")
    return summarise(results)


def summarise(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Everything a report says."""
    runs = sorted(map(Run.of, results), key=lambda run: (run.order, run.length, run.processes))
    speeds, tables = _speeds(runs), _accuracy(runs)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "title": runs[0].result.document[KIND]["title"],
        "accuracy": tables,
        "overview": _overview(tables),
        "speed": speeds,
        "crossovers": _crossovers(speeds),
        "machines": _each(run.machine for run in runs),
        "versions": _each(run.result.versions for run in runs),
        "commits": _each(run.result.git for run in runs),
        "files": [run.result.file for run in runs],
    }


def _each(values: Iterable[Any]) -> list[Any]:
    """Every value once."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _groups(runs: Iterable[Run], *names: str) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in names), []).append(run)
    return groups


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean, and standard deviation where there are two values or more.

    >>> over_seeds([1.0, 3.0])
    {'mean': 2.0, 'spread': 1.4142135623730951, 'values': [1.0, 3.0]}
    """
    known = [value for value in values if value is not None]
    mean = statistics.mean(known) if known else None
    return {"mean": mean, "spread": statistics.stdev(known) if len(known) > 1 else None, "values": known}


def _accuracy(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A table for each task, model, data, length and budget; on as few processes as it was run on."""
    tables = []
    for (part, _), group in _groups([run for run in runs if run.judged], "part", "measured_on").items():
        fewest = min(run.processes for run in group)
        first = group[0].result
        metric = _with_chance(first)
        rows = _groups([run for run in group if run.processes == fewest], "row")
        entries = [{"row": row, **_entry(found, group, metric)} for (row,), found in rows.items()]
        tables.append(
            {
                "part": part,
                "task": first.task,
                "model": first.model,
                "dataset": first.dataset,
                "metric": first.main_metric,
                "lower_is_better": metric.lower_is_better,
                "scale": metric.scale,
                "examples": metric.n,
                "chance": metric.chance,
                "learnt": all(entry["learnt"] for entry in entries if entry["attention"] == SOFTMAX),
                "budget": first.budget,
                "length": group[0].length,
                "processes": fewest,
                "rows": _with_shares(entries, metric.lower_is_better),
            }
        )
    return tables


def _entry(found: Sequence[Run], group: Sequence[Run], metric: Metric) -> dict[str, Any]:
    """A row of a table, over its seeds."""
    results = [run.result for run in found]
    values = over_seeds(result.metrics[result.main_metric].value for result in results)
    return {
        **found[0].identity(group),
        "seeds": sorted(result.seed for result in results),
        "metric": values,
        "stages": {stage: over_seeds(_at(stage, result) for result in results) for stage in STAGES},
        "samples_per_second": over_seeds(result.samples_per_second for result in results),
        "attention_error": _errors(results),
        "learnt": metric.beats_chance(values["mean"]),
    }


def _with_chance(result: TaskResult) -> Metric:
    """The main metric. For accuracies of runs that did not record the best constant answer, chance is a blind guess."""
    metric, labels = result.metrics[result.main_metric], 3 if result.task in ("mnli", "snli") else 2
    if metric.chance is None and metric.scale and result.main_metric == "accuracy" and result.task in GLUE:
        return replace(metric, chance=metric.scale / labels)
    return metric


def _at(stage: str, result: TaskResult) -> float | None:
    """The metric that a run recorded at a stage before its training."""
    for entry in result.document.get("history", ()):
        if entry.get("stage") == stage:
            return float(entry["metrics"][result.main_metric]["value"])
    return None


def _errors(results: Sequence[TaskResult]) -> dict[str, Any] | None:
    """Mean over layers and seeds, before training, after attention transfer and after training; null for softmax."""
    found = []
    for result in results:
        errors, taught = result.document.get("attention_error"), result.document.get("transfer")
        if not errors:
            return None
        at = {when: errors[when] and errors[when]["overall"] for when in ("before", "after")}
        found.append({**at, "transferred": taught and taught["error"]["after"]})
    means = {when: [each[when] and statistics.mean(each[when]) for each in found] for when in WHEN}
    return {when: _mean(values) for when, values in means.items()}


def _with_shares(rows: list[dict[str, Any]], lower_is_better: bool) -> list[dict[str, Any]]:
    """Beside softmax: the share of its metric (of a loss, how many times its), and how far a row is on the way from no
    attention at all to softmax. None where softmax itself has not learnt the task.
    """
    learnt = [row for row in rows if row["attention"] == SOFTMAX and row["learnt"]]
    softmax = learnt[0]["metric"]["mean"] if learnt else None
    unpatched = learnt[0]["stages"][STAGES[0]]["mean"] if learnt else None
    nothing = next((row["metric"]["mean"] for row in rows if row["control"] == NO_ATTENTION), None)
    gap = None if softmax is None or nothing is None else softmax - nothing
    helps = gap is not None and (gap < 0 if lower_is_better else gap > 0)
    for row in rows:
        mean = row["metric"]["mean"]
        row["over_softmax"] = mean / softmax if softmax else None
        row["stages_over_softmax"] = {
            stage: value["mean"] / unpatched if unpatched and value["mean"] is not None else None
            for stage, value in row["stages"].items()
        }
        row["from_average_to_softmax"] = (mean - nothing) / gap if helps else None
    return rows


def _overview(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row over all tables, softmax first and controls last; the mean share is over those whose metric is a score
    and where softmax has learnt the task, of rows in all of these.
    """
    overview = []
    for name in _each(row["row"] for table in tables for row in table["rows"]):
        found = [next((row for row in table["rows"] if row["row"] == name), None) for table in tables]
        there = [row for row in found if row]
        shared = [table["learnt"] and not table["lower_is_better"] for table in tables]
        scores = [row for row, counts in zip(found, shared, strict=True) if counts]
        overview.append(
            {
                "row": name,
                "attention": there[0]["attention"],
                "control": next((row["control"] for row in there if row["control"]), None),
                "mean_share_of_softmax": _mean([row and row["over_softmax"] for row in scores]),
                "mean_share_by_stage": {
                    stage: _mean([row and row["stages_over_softmax"][stage] for row in scores]) for stage in STAGES
                },
            }
        )
    return sorted(overview, key=lambda each: (each["control"] in CONTROLS, each["attention"] != SOFTMAX))


def _mean(values: Sequence[float | None]) -> float | None:
    """Of all of them, or None if one is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if values and len(known) == len(values) else None


def _speeds(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By task, row, length and processes; efficiency is against one process with as many threads."""
    entries: dict[Any, dict[str, Any]] = {}
    names = ("part", "row", "length", "processes", "machine")
    for key, found in _groups(runs, *names).items():
        results = [run.result for run in found]
        entries[key] = {
            **dict(zip(names, key, strict=True)),
            **found[0].identity(),
            "model": results[0].model,
            "seeds": sorted(result.seed for result in results),
            "samples_per_second": over_seeds(result.samples_per_second for result in results),
            "tokens_per_second": over_seeds(result.tokens_per_second for result in results),
            "peak_memory_bytes": max(result.peak_memory_bytes or 0 for result in results) or None,
        }
    softmax = {(part, *rest): e for (part, _, *rest), e in reversed(entries.items()) if e["attention"] == SOFTMAX}
    for (part, row, length, processes, machine), entry in entries.items():
        alone = entries.get((part, row, length, 1, machine))
        entry["efficiency"] = _ratio(entry, alone, processes)
        entry["over_softmax"] = _ratio(entry, softmax.get((part, length, processes, machine)))
    return list(entries.values())


def _ratio(entry: Mapping[str, Any], base: Mapping[str, Any] | None, times: int = 1) -> float | None:
    own = entry["tokens_per_second"]["mean"]
    theirs = base["tokens_per_second"]["mean"] if base else None
    return own / theirs / times if own and theirs else None


def _crossovers(speeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For tasks that were run at several lengths: from which on a row trains faster than softmax."""
    found = []
    for part, row, processes in _each((e["part"], e["row"], e["processes"]) for e in speeds):
        same = [e for e in speeds if (e["part"], e["row"], e["processes"]) == (part, row, processes)]
        rows = [entry for entry in same if entry["over_softmax"]]
        lengths = [entry["length"] for entry in rows]
        if len(set(lengths)) < 2 or rows[0]["attention"] == SOFTMAX:
            continue
        length, interpolated = measured_crossover(lengths, [entry["over_softmax"] for entry in rows])
        found.append(
            {
                "part": part, "row": row, "mechanism": rows[0]["mechanism"], "processes": processes, "length": length,
                "interpolated": interpolated, "lengths": lengths,
            }
        )  # fmt: skip
    return found
