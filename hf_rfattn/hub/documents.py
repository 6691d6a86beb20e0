"""The result documents that a card is made from: what they hold, and the check that they hold it.

All begin with what `hf_rfattn.bench.results.new_result(kind, seed=...)` gives: schema_version, kind, created, git
(commit, changed), versions, hardware, seed. `[...]` marks what may be missing.

kind "task", one a training run:
    model         the base model's name on the Hub
    base_license  its licence as the Hub spells it, or null
    task          "sst2"; task_type: as the Hub calls it, "text-classification"
    dataset       {name, [config], split, fingerprint}: what it was measured on
    attention     "softmax", a mechanism's document {"mechanism": ..., options}, or {"layers": {"0-5": either, ...}}
    metrics       {name: {value, n, [scale], [lower_is_better], [chance]}}; n: examples; scale: a perfect score, 1 or
                  100; chance: the score of the best constant answer
    [main_metric] the one that tables and plots show first; else the first
    budget        {epochs or steps, learning_rate, ...}: runs compared with each other have equal budgets
    [transfer]    {steps, batch_size, ...}: attention transfer before training, which the budget does not count; or null
    [history]     [{step, metrics, [stage]}, ...]: further evaluations; stage: one of STAGES, those before training
    samples_per_second, tokens_per_second, peak_memory_bytes, wall_time_seconds: numbers or null
    [checkpoint]  `checkpoint_fingerprint` of the folder this run saved
    [command]     the words of the command line

kind "speed", one a pair of models:
    model, attention, batch, dtype, as above
    lengths       [{length, softmax_seconds, patched_seconds, [softmax_peak_bytes, patched_peak_bytes]}, ...],
                  a forward pass each
    [checkpoint], [command]

kind "transfer", one a conversion without fine-tuning:
    model, base_license, dataset, attention, as above
    transfer      {steps, batch_size, ...}
    errors        {before, after}: each {layers, overall, average, ...}, relative errors against softmax by layer
    [checkpoint], [command]
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.results import SCHEMA_VERSION, machine, without_folders
from .folder import check_attention

LOWER_IS_BETTER = {"loss", "perplexity"}
CORRELATIONS = {"matthews_correlation", "pearson", "spearmanr"}  # 0 for a constant answer
FRACTIONS = {"accuracy", "f1", "exact_match", "matthews_correlation", "pearson", "spearmanr"}
STAGES = ("before training", "after transfer")  # evaluations of a run that has not begun to train
NOT_FOR_CARDS = "bench "  # how the kinds of other documents begin


@dataclass(frozen=True)
class Metric:
    """`scale`: what a perfect score is, `chance`: the score of the best constant answer, if they are known."""

    value: float
    n: int
    scale: float | None
    lower_is_better: bool
    chance: float | None = None


@dataclass(frozen=True)
class Result:
    """What both kinds share. `document` is the whole file."""

    file: str
    document: Mapping[str, Any]
    model: str
    attention: Any
    seed: int
    checkpoint: str | None

    @property
    def machine(self) -> str:
        return machine(self.document["hardware"])


@dataclass(frozen=True)
class TaskResult(Result):
    base_license: str | None
    task: str
    task_type: str
    dataset: Mapping[str, Any]
    metrics: Mapping[str, Metric]
    main_metric: str
    budget: Mapping[str, Any]
    samples_per_second: float | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None
    wall_time_seconds: float | None

    @property
    def measured_on(self) -> str:
        """Equal for results that may stand in one table."""
        return json.dumps([self.model, self.task, self.dataset, self.budget], sort_keys=True)


@dataclass(frozen=True)
class Timing:
    length: int
    softmax_seconds: float
    patched_seconds: float
    softmax_peak_bytes: float | None
    patched_peak_bytes: float | None

    @property
    def speed(self) -> float:
        """Over that of softmax."""
        return self.softmax_seconds / self.patched_seconds


@dataclass(frozen=True)
class SpeedResult(Result):
    batch: int
    dtype: str
    lengths: tuple[Timing, ...]


@dataclass(frozen=True)
class TransferResult(Result):
    """Errors by layer; `average` is what plain averaging would give."""

    base_license: str | None
    dataset: Mapping[str, Any]
    transfer: Mapping[str, Any]
    layers: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    average: tuple[float, ...]


def read_results(folder: Path) -> list[Result]:
    """Every document in a folder, by file name and without paths; other benchmarks' are left out. A folder that is
    missing has none.
    """
    found: list[Result] = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON document: {error}.") from error
        kind = document.get("kind") if isinstance(document, dict) else None
        if not (isinstance(kind, str) and kind.startswith(NOT_FOR_CARDS)):
            found.append(parse_result(without_folders(document) if isinstance(document, dict) else document, path.name))
    return found


def parse_result(document: Any, file: str = "result.json") -> TaskResult | SpeedResult | TransferResult:
    """A checked document; what is wrong with it is a ValueError that says where."""
    fields = _Fields(document, file)
    version, kind = fields.integer("schema_version"), fields.text("kind")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version {version} is not known here, only {SCHEMA_VERSION}.")
    for name in ("git", "versions", "hardware"):
        fields.mapping(name)
    checkpoint = document.get("checkpoint")
    if checkpoint is not None:
        fields.text("checkpoint")
    shared = {
        "file": file,
        "document": document,
        "model": fields.text("model"),
        "attention": fields.attention("attention"),
        "seed": fields.integer("seed"),
        "checkpoint": checkpoint,
    }
    if kind == "task":
        return _parse_task(fields, shared)
    if kind == "speed":
        return _parse_speed(fields, shared)
    if kind == "transfer":
        return _parse_transfer(fields, shared)
    raise ValueError(
        f"{file}: kind {kind!r} is not possible; it is 'task', 'speed', 'transfer', or begins with {NOT_FOR_CARDS!r}."
    )


def _parse_task(fields: "_Fields", shared: dict[str, Any]) -> TaskResult:
    dataset = fields.inside("dataset")
    for name in ("name", "split", "fingerprint"):
        dataset.text(name)
    metrics = fields.inside("metrics")
    if not metrics.document:
        raise ValueError(f"{fields.where}: metrics is empty; a result without a metric says nothing.")
    main_metric = fields.document.get("main_metric", next(iter(metrics.document)))
    if main_metric not in metrics.document:
        raise ValueError(f"{fields.where}: main_metric {main_metric!r} is none of {', '.join(metrics.document)}.")
    return TaskResult(
        **shared,
        base_license=None if fields.value("base_license") is None else fields.text("base_license"),
        task=fields.text("task"),
        task_type=fields.text("task_type"),
        dataset=dataset.document,
        metrics={name: _parse_metric(metrics.inside(name), name) for name in metrics.document},
        main_metric=main_metric,
        budget=fields.mapping("budget"),
        samples_per_second=fields.positive("samples_per_second"),
        tokens_per_second=fields.positive("tokens_per_second"),
        peak_memory_bytes=fields.positive("peak_memory_bytes"),
        wall_time_seconds=fields.positive("wall_time_seconds"),
    )


def _parse_metric(fields: "_Fields", name: str) -> Metric:
    value, n = fields.number("value"), fields.integer("n")
    if n < 1:
        raise ValueError(f"{fields.where}: n is the number of examples, at least 1, not {n}.")
    scale = fields.document.get("scale")
    if scale is None and name in FRACTIONS and abs(value) <= 1:
        scale = 1
    if scale not in (None, 1, 100):
        raise ValueError(f"{fields.where}: scale must be 1 or 100, not {scale!r}.")
    chance = fields.number("chance") if fields.document.get("chance") is not None else None
    if chance is None and name in CORRELATIONS:
        chance = 0.0
    return Metric(value, n, scale, bool(fields.document.get("lower_is_better", name in LOWER_IS_BETTER)), chance)


def _parse_speed(fields: "_Fields", shared: dict[str, Any]) -> SpeedResult:
    rows = fields.value("lengths")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{fields.where}: lengths must be a list of measurements, not {rows!r}.")
    timings = []
    for i, row in enumerate(rows):
        each = _Fields(row, f"{fields.where}: lengths[{i}]")
        seconds = {name: each.positive(name) for name in ("softmax_seconds", "patched_seconds")}
        if None in seconds.values():
            raise ValueError(f"{each.where}: softmax_seconds and patched_seconds must both be measured.")
        peaks = {
            name: each.positive(name) if name in each.document else None
            for name in ("softmax_peak_bytes", "patched_peak_bytes")
        }
        timings.append(Timing(length=each.integer("length"), **seconds, **peaks))  # type: ignore[arg-type]
    if len({t.length for t in timings}) < len(timings):
        raise ValueError(f"{fields.where}: a length is there twice.")
    return SpeedResult(
        **shared,
        batch=fields.integer("batch"),
        dtype=fields.text("dtype"),
        lengths=tuple(sorted(timings, key=lambda timing: timing.length)),
    )


def _parse_transfer(fields: "_Fields", shared: dict[str, Any]) -> TransferResult:
    dataset, errors = fields.inside("dataset"), fields.inside("errors")
    for name in ("name", "split", "fingerprint"):
        dataset.text(name)
    before, after = errors.inside("before"), errors.inside("after")
    layers = after.value("layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{after.where}: layers must be a list of names, not {layers!r}.")
    return TransferResult(
        **shared,
        base_license=None if fields.value("base_license") is None else fields.text("base_license"),
        dataset=dataset.document,
        transfer=fields.mapping("transfer"),
        layers=tuple(layers),
        before=before.numbers("overall", len(layers)),
        after=after.numbers("overall", len(layers)),
        average=after.numbers("average", len(layers)),
    )


class _Fields:
    """Fields of a JSON object, each checked as it is read."""

    def __init__(self, document: Any, where: str):
        if not isinstance(document, dict):
            raise ValueError(f"{where} must be a JSON object, not {type(document).__name__}.")
        self.document, self.where = document, where

    def value(self, name: str) -> Any:
        if name not in self.document:
            raise ValueError(
                f"{self.where} has no {name!r}; it has {', '.join(map(repr, self.document)) or 'nothing'}."
            )
        return self.document[name]

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.where}: {name} must be text, not {value!r}.")
        return value

    def number(self, name: str) -> float:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{self.where}: {name} must be a finite number, not {value!r}.")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        values = self.value(name)
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(f"{self.where}: {name} must be a list of {count} numbers, not {values!r}.")
        return tuple(_Fields({name: value}, self.where).number(name) for value in values)

    def integer(self, name: str) -> int:
        value = self.number(name)
        if not isinstance(value, int):
            raise ValueError(f"{self.where}: {name} must be a whole number, not {value!r}.")
        return value

    def positive(self, name: str) -> float | None:
        """Above zero, or null for what was not measured."""
        if self.value(name) is None:
            return None
        value = self.number(name)
        if value <= 0:
            raise ValueError(f"{self.where}: {name} must be above zero or null, not {value!r}.")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        return self.inside(name).document

    def inside(self, name: str) -> "_Fields":
        return _Fields(self.value(name), f"{self.where}: {name}")

    def attention(self, name: str) -> Any:
        try:
            return check_attention(self.value(name))
        except ValueError as error:
            raise ValueError(f"{self.where}: {name}: {error}") from error
