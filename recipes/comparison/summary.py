"""The results of a comparison as one JSON document, from which its tables and plots are made."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_rfattn import attention_label, mechanism_names_in
from hf_rfattn.results import (
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
BLIND = ("sst2", "mnli", "qnli", "rte", "wnli", "snli")  # tasks whose chance is a blind guess, if not recorded
WHEN = ("before", "transferred", "after")  # errors against softmax


def read_summary(folder: Path) -> dict[str, Any]:
    """Of all results in a folder that have a place in a comparison."""
    results = [each for each in read_results(folder) if isinstance(each, TaskResult) and KIND in each.document]
    if not results:
        raise ValueError(f"{folder} holds no results of a comparison.")
    return summarise(results)


def summarise(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Everything a report says."""
    runs = sorted(results, key=lambda run: (_place(run)["order"], _length(run), _processes(run)))
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "title": _place(runs[0])["title"],
        "accuracy": _accuracy(runs),
        "speed": _speeds(runs),
        "machines": list(dict.fromkeys(run.machine for run in runs)),
        "versions": [dict(each) for each in dict.fromkeys(tuple(run.versions.items()) for run in runs)],
        "commits": list(dict.fromkeys(run.git["commit"] or "unknown" for run in runs)),
        "files": [run.file for run in runs],
    }


def _place(run: TaskResult) -> Mapping[str, Any]:
    return run.document[KIND]


def _length(run: TaskResult) -> int:
    return int(run.budget["max_length"])


def _processes(run: TaskResult) -> int:
    return int(run.document["processes"])


def _groups(runs: Iterable[TaskResult], key: Any) -> dict[Any, list[TaskResult]]:
    groups: dict[Any, list[TaskResult]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean, and standard deviation where there are two values or more.

    >>> over_seeds([1.0, 3.0])
    {'mean': 2.0, 'spread': 1.4142135623730951, 'values': [1.0, 3.0]}
    """
    known = [value for value in values if value is not None]
    mean = statistics.mean(known) if known else None
    return {"mean": mean, "spread": statistics.stdev(known) if len(known) > 1 else None, "values": known}


def _identity(run: TaskResult, others: Iterable[TaskResult] = ()) -> dict[str, Any]:
    """What a row's attention is called, and what it is a control of beside others."""
    own, *rest = ([] if "layers" in r.attention else mechanism_names_in(r.attention) for r in (run, *others))
    mechanism = next(iter(mechanism_names_in(run.attention)), SOFTMAX)
    return {"attention": attention_label(run.attention), "mechanism": mechanism, "control": control_of(own, rest)}


def _measured(runs: Sequence[TaskResult]) -> dict[str, Any]:
    """Speed and memory, over seeds."""
    return {
        "seeds": sorted(run.seed for run in runs),
        "samples_per_second": over_seeds(run.samples_per_second for run in runs),
        "tokens_per_second": over_seeds(run.tokens_per_second for run in runs),
        "peak_memory_bytes": max(run.peak_memory_bytes or 0 for run in runs) or None,
    }


def _accuracy(runs: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """A table for each task, model, data, length and budget; on as few processes as it was run on."""
    tables = []
    judged = [run for run in runs if _place(run)["accuracy"]]
    for (part, _), group in _groups(judged, lambda run: (_place(run)["part"], run.measured_on)).items():
        fewest, first = min(map(_processes, group)), group[0]
        metric = _with_chance(first)
        rows = []
        for row, found in _groups([r for r in group if _processes(r) == fewest], lambda r: _place(r)["row"]).items():
            values = over_seeds(run.metrics[run.main_metric].value for run in found)
            rows.append(
                {
                    "row": row,
                    **_identity(found[0], group),
                    **_measured(found),
                    "metric": values,
                    "stages": {stage: over_seeds(_at(stage, run) for run in found) for stage in STAGES},
                    "attention_error": _errors(found),
                    "learnt": metric.beats_chance(values["mean"]),
                }
            )
        softmax = next((row for row in rows if row["attention"] == SOFTMAX), None)
        for row in rows:  # no share of a score that a constant answer has, too
            row["over_softmax"] = _ratio(row, softmax, "metric") if softmax and softmax["learnt"] else None
            row["speed_over_softmax"] = _ratio(row, softmax, "samples_per_second")
        tables.append(
            {
                "part": part,
                "model": first.model,
                "dataset": first.dataset,
                "metric": first.main_metric,
                "lower_is_better": metric.lower_is_better,
                "scale": metric.scale,
                "examples": metric.n,
                "chance": metric.chance,
                "learnt": bool(softmax and softmax["learnt"]),
                "budget": first.budget,
                "length": _length(first),
                "processes": fewest,
                "rows": rows,
            }
        )
    return tables


def _with_chance(result: TaskResult) -> Metric:
    """The main metric. For accuracies of runs that did not record the best constant answer, chance is a blind guess."""
    metric, labels = result.metrics[result.main_metric], 3 if result.task in ("mnli", "snli") else 2
    if metric.chance is None and metric.scale and result.main_metric == "accuracy" and result.task in BLIND:
        return replace(metric, chance=metric.scale / labels)
    return metric


def _at(stage: str, result: TaskResult) -> float | None:
    """The metric that a run recorded at a stage before its training."""
    for entry in result.document.get("history", ()):
        if entry.get("stage") == stage:
            return float(entry["metrics"][result.main_metric]["value"])
    return None


def _errors(results: Sequence[TaskResult]) -> dict[str, float | None]:
    """Against softmax: mean over layers and seeds, before training, after attention transfer and after training."""
    found: dict[str, list[float]] = {when: [] for when in WHEN}
    for result in results:
        errors, taught = result.document.get("attention_error") or {}, result.document.get("transfer")
        by_layer = {when: each["overall"] for when, each in errors.items() if each}
        if taught and errors:
            by_layer["transferred"] = taught["error"]["after"]
        for when, values in by_layer.items():
            found[when].append(statistics.mean(values))
    return {when: statistics.mean(values) if len(values) == len(results) else None for when, values in found.items()}


def _ratio(entry: Mapping[str, Any], base: Mapping[str, Any] | None, name: str, times: int = 1) -> float | None:
    own, theirs = entry[name]["mean"], base[name]["mean"] if base else None
    return own / theirs / times if own is not None and theirs else None


def _speeds(runs: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """By task, row, length and processes; efficiency is against one process with as many threads."""
    entries: dict[Any, dict[str, Any]] = {}
    names = ("part", "row", "length", "processes", "machine")
    keys = _groups(runs, lambda r: (_place(r)["part"], _place(r)["row"], _length(r), _processes(r), r.machine))
    for key, found in keys.items():
        own = {**dict(zip(names, key, strict=True)), **_identity(found[0]), "model": found[0].model}
        entries[key] = {**own, **_measured(found)}
    softmax = {(part, *rest): e for (part, _, *rest), e in reversed(entries.items()) if e["attention"] == SOFTMAX}
    for (part, row, length, processes, machine), entry in entries.items():
        alone = entries.get((part, row, length, 1, machine))
        entry["efficiency"] = _ratio(entry, alone, "tokens_per_second", processes)
        entry["over_softmax"] = _ratio(entry, softmax.get((part, length, processes, machine)), "tokens_per_second")
    return list(entries.values())


def crossovers(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For tasks that were run at several lengths: from which on a row is faster than softmax."""
    found = []
    for part, row, processes in dict.fromkeys((e["part"], e["row"], e["processes"]) for e in summary["speed"]):
        rows = [
            entry
            for entry in summary["speed"]
            if (entry["part"], entry["row"], entry["processes"]) == (part, row, processes) and entry["over_softmax"]
        ]
        lengths = [entry["length"] for entry in rows]
        if len(set(lengths)) > 1 and rows[0]["attention"] != SOFTMAX:
            length, interpolated = measured_crossover(lengths, [entry["over_softmax"] for entry in rows])
            own = {"part": part, "row": row, "mechanism": rows[0]["mechanism"], "processes": processes}
            found.append({**own, "length": length, "interpolated": interpolated, "lengths": lengths})
    return found
