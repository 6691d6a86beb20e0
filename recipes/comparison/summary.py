"""What the results of a comparison say, as one JSON document. Tables and plots are made from it and nothing else."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune_glue import TASKS
from finetune_snli import SnliTask

from hf_rfattn.hub.comparison import CONTROLS, NO_ATTENTION, control_of
from hf_rfattn.hub.folder import attention_label, mechanism_names_in
from hf_rfattn.results import (
    SCHEMA_VERSION,
    SOFTMAX,
    STAGES,
    Metric,
    TaskResult,
    machine,
    measured_crossover,
    parse_result,
)

KIND = "comparison"
CLASSES = {name: len(task.labels) for name, task in {**TASKS, SnliTask.name: SnliTask.text_task}.items()}


def read_summary(folder: Path) -> dict[str, Any]:
    """Of all results in a folder that have a place in a comparison."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON document: {error}.") from error
        if isinstance(document, dict) and KIND in document:
            result = parse_result(document, path.name)
            if isinstance(result, TaskResult):
                results.append(result)
    if not results:
        raise ValueError(f"{folder} holds no results of a comparison.")
    return summarise(results)


def summarise(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Everything a report says."""
    ordered = sorted(results, key=lambda result: (_place(result)["order"], _length(result), _processes(result)))
    speeds = _speeds(ordered)
    tables = _accuracy(ordered)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "title": _place(ordered[0])["title"],
        "accuracy": tables,
        "overview": _overview(tables),
        "speed": speeds,
        "crossovers": _crossovers(speeds),
        "machines": _each(_machine(result) for result in ordered),
        "versions": _each(result.document["versions"] for result in ordered),
        "commits": _each(result.document["git"] for result in ordered),
        "files": [result.file for result in ordered],
    }


def _place(result: TaskResult) -> Mapping[str, Any]:
    return result.document[KIND]


def _length(result: TaskResult) -> int:
    return int(result.budget["max_length"])


def _processes(result: TaskResult) -> int:
    return int(result.document["processes"])


def _machine(result: TaskResult) -> str:
    return machine(result.document["hardware"])


def _each(values: Iterable[Any]) -> list[Any]:
    """Every value once."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _groups(results: Iterable[TaskResult], *keys: Any) -> dict[Any, list[TaskResult]]:
    groups: dict[Any, list[TaskResult]] = {}
    for result in results:
        groups.setdefault(tuple(key(result) for key in keys), []).append(result)
    return groups


def _part(result: TaskResult) -> str:
    return str(_place(result)["part"])


def _row(result: TaskResult) -> str:
    return str(_place(result)["row"])


def over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, and standard deviation where there are two values or more.

    >>> over_seeds([1.0, 3.0])
    {'mean': 2.0, 'spread': 1.4142135623730951, 'values': [1.0, 3.0]}
    """
    known = [value for value in values if value is not None]
    mean = statistics.mean(known) if known else None
    return {"mean": mean, "spread": statistics.stdev(known) if len(known) > 1 else None, "values": known}


def _accuracy(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """A table for each task, model, data, length and budget; on as few processes as it was run on."""
    tables = []
    judged = [result for result in results if _place(result)["accuracy"]]
    for (part, _), group in _groups(judged, _part, lambda result: result.measured_on).items():
        fewest = min(map(_processes, group))
        rows = _groups([result for result in group if _processes(result) == fewest], _row)
        first = group[0]
        metric = _with_chance(first)
        attentions = [result.attention for result in group]
        entries = [
            {
                "row": row,
                **_identity(found[0], attentions),
                "seeds": sorted(result.seed for result in found),
                "metric": over_seeds([result.metrics[first.main_metric].value for result in found]),
                "stages": {stage: over_seeds([_at(stage, result) for result in found]) for stage in STAGES},
                "samples_per_second": over_seeds([result.samples_per_second for result in found]),
                "attention_error": _errors(found),
            }
            for (row,), found in rows.items()
        ]
        for entry in entries:
            entry["learnt"] = metric.beats_chance(entry["metric"]["mean"])
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
                "length": _length(first),
                "processes": fewest,
                "rows": _with_shares(entries, metric.lower_is_better),
            }
        )
    return tables


def _with_chance(result: TaskResult) -> Metric:
    """The main metric. For accuracies of runs that did not record the best constant answer, chance is a blind guess."""
    metric, labels = result.metrics[result.main_metric], CLASSES.get(result.task)
    if metric.chance is None and metric.scale and result.main_metric == "accuracy" and labels:
        return dataclasses.replace(metric, chance=metric.scale / labels)
    return metric


def _at(stage: str, result: TaskResult) -> float | None:
    """The metric that a run recorded at a stage before its training."""
    for entry in result.document.get("history", ()):
        if entry.get("stage") == stage:
            return float(entry["metrics"][result.main_metric]["value"])
    return None


def _identity(result: TaskResult, others: Iterable[Any]) -> dict[str, Any]:
    names = mechanism_names_in(result.attention)
    return {
        "attention": attention_label(result.attention),
        "mechanism": names[0] if names else SOFTMAX,
        "control": control_of(result.attention, others),
    }


def _errors(results: Sequence[TaskResult]) -> dict[str, Any] | None:
    """Mean over layers and seeds, before training, after attention transfer and after training; null for softmax."""
    found = []
    for result in results:
        errors, taught = result.document.get("attention_error"), result.document.get("transfer")
        if not errors:
            return None
        at = {when: errors[when] and errors[when]["overall"] for when in ("before", "after")}
        found.append({**at, "transferred": taught and taught["error"]["after"]})
    return {
        when: statistics.mean(statistics.mean(each[when]) for each in found)
        if all(each[when] for each in found)
        else None
        for when in ("before", "transferred", "after")
    }


def _with_shares(rows: list[dict[str, Any]], lower_is_better: bool) -> list[dict[str, Any]]:
    """Beside softmax: the share of its metric (of a loss, how many times its), and how far a row is on the way from no
    attention at all to softmax. None where softmax itself has not learnt the task.
    """
    softmax = next((row["metric"]["mean"] for row in rows if row["attention"] == SOFTMAX and row["learnt"]), None)
    first = [row["stages"][STAGES[0]]["mean"] for row in rows if row["attention"] == SOFTMAX and row["learnt"]]
    unpatched = next(iter(first), None)
    nothing = next((row["metric"]["mean"] for row in rows if row["control"] == NO_ATTENTION), None)
    for row in rows:
        mean = row["metric"]["mean"]
        row["over_softmax"] = mean / softmax if softmax else None
        row["stages_over_softmax"] = {
            stage: value["mean"] / unpatched if unpatched and value["mean"] is not None else None
            for stage, value in row["stages"].items()
        }
        gap = None if softmax is None or nothing is None else softmax - nothing
        better = gap is not None and (gap < 0 if lower_is_better else gap > 0)
        row["from_average_to_softmax"] = (mean - nothing) / gap if better else None
    return rows


def _overview(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row over all tables, softmax first and controls last; the mean share is over those whose metric is a score
    and where softmax has learnt the task, of rows in all of these.
    """
    rows = _each(row["row"] for table in tables for row in table["rows"])
    overview = []
    for name in rows:
        found = [next((row for row in table["rows"] if row["row"] == name), None) for table in tables]
        shared = [table["learnt"] and not table["lower_is_better"] for table in tables]
        scores = [row for row, counts in zip(found, shared, strict=True) if counts]
        overview.append(
            {
                "row": name,
                "attention": next(row["attention"] for row in found if row),
                "control": next((row["control"] for row in found if row and row["control"]), None),
                "mean_share_of_softmax": _mean([row and row["over_softmax"] for row in scores]),
                "mean_share_by_stage": {
                    stage: _mean([row and row["stages_over_softmax"][stage] for row in scores]) for stage in STAGES
                },
            }
        )
    return sorted(overview, key=lambda each: (each["control"] in CONTROLS, each["attention"] != SOFTMAX))


def _mean(values: Sequence[float | None]) -> float | None:
    """Of all of them, or None if one is missing."""
    return None if not values or None in values else statistics.mean(values)  # type: ignore[type-var]


def _speeds(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """By task, row, length and processes; efficiency is against one process with as many threads."""
    entries = []
    groups = _groups(results, _part, _row, _length, _processes, _machine)
    for (part, row, length, processes, where), found in groups.items():
        first = found[0]
        entries.append(
            {
                "part": part,
                "row": row,
                **_identity(first, []),
                "model": first.model,
                "length": length,
                "processes": processes,
                "machine": where,
                "seeds": sorted(result.seed for result in found),
                "samples_per_second": over_seeds([result.samples_per_second for result in found]),
                "tokens_per_second": over_seeds([result.tokens_per_second for result in found]),
                "peak_memory_bytes": max((result.peak_memory_bytes or 0 for result in found), default=0) or None,
            }
        )
    for entry in entries:
        entry["efficiency"] = _ratio(entry, _find(entries, entry, processes=1), entry["processes"])
        entry["over_softmax"] = _ratio(entry, _find(entries, entry, row=None), 1)
    return entries


def _find(entries: Sequence[Mapping[str, Any]], like: Mapping[str, Any], **other: Any) -> Mapping[str, Any] | None:
    """The entry that differs in these only; row None is softmax."""
    keys = [key for key in ("part", "row", "length", "processes", "machine") if key not in other]
    for entry in entries:
        fits = all(entry[key] == like[key] for key in keys)
        if "row" in other:
            fits = fits and entry["attention"] == SOFTMAX
        else:
            fits = fits and all(entry[key] == value for key, value in other.items())
        if fits:
            return entry
    return None


def _ratio(entry: Mapping[str, Any], base: Mapping[str, Any] | None, times: int) -> float | None:
    own = entry["tokens_per_second"]["mean"]
    theirs = base["tokens_per_second"]["mean"] if base else None
    return own / theirs / times if own and theirs else None


def _crossovers(speeds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For tasks that were run at several lengths: from which on a row trains faster than softmax."""
    found = []
    for part, row, processes in _each((e["part"], e["row"], e["processes"]) for e in speeds):
        rows = [
            entry
            for entry in speeds
            if (entry["part"], entry["row"], entry["processes"]) == (part, row, processes) and entry["over_softmax"]
        ]
        lengths = [entry["length"] for entry in rows]
        if len(set(lengths)) < 2 or rows[0]["attention"] == SOFTMAX:
            continue
        length, interpolated = measured_crossover(lengths, [entry["over_softmax"] for entry in rows])
        mechanism = rows[0]["mechanism"]
        found.append(
            {
                "part": part, "row": row, "mechanism": mechanism, "processes": processes, "length": length,
                "interpolated": interpolated, "lengths": lengths,
            }
        )  # fmt: skip
    return found
