"""The result documents that cards and comparisons read, as dataclasses, and the check of a document against them.

Fields of the classes are those of the documents: one without a default is required. Documents may hold more, which
stays in `Result.document`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from .documents import SCHEMA_VERSION, machine, read_result, without_folders

SOFTMAX = "softmax"
STAGES = ("before training", "after transfer")  # evaluations before the first training step
NO_ATTENTION, NEAR, FAR = "control: no attention", "control: window alone", "far field of fmm alone"
CONTROLS = (NO_ATTENTION, NEAR)  # not meant to be used

_FRACTION, _CORRELATION, _LOSS = {"scale": 1}, {"scale": 1, "chance": 0.0}, {"lower_is_better": True}
KNOWN_METRICS: dict[str, dict[str, Any]] = {  # what documents may leave out
    **dict.fromkeys(("accuracy", "f1", "exact_match"), _FRACTION),
    **dict.fromkeys(("matthews_correlation", "pearson", "spearmanr"), _CORRELATION),
    **dict.fromkeys(("loss", "perplexity"), _LOSS),
}
Number = int | float
LAYER_ERRORS = ("layers", "overall", "average")


def control_of(names: Sequence[str], others: Iterable[Sequence[str]]) -> str | None:
    """What a row of a table is a control of, beside the `others`.

    `names`: the mechanisms of a row, as `hf_rfattn.mechanism_names_in` gives them; empty for a row whose layers differ.

    >>> control_of(["average"], []), control_of(["favor+"], [[]]), control_of(["favor+"], [["fmm", "favor+"]])
    ('control: no attention', None, 'far field of fmm alone')
    """
    if list(names) in (["average"], ["band"]):
        return NO_ATTENTION if names[0] == "average" else NEAR
    far = {name for other in others if other[:1] == ["fmm"] for name in other[1:]}
    return FAR if len(names) == 1 and names[0] in far else None


@dataclass(frozen=True)
class Metric:
    """`n`: number of examples. `scale`: the perfect score. `chance`: score of the best constant answer, if known."""

    value: Number
    n: int
    scale: Number | None = None
    lower_is_better: bool = False
    chance: Number | None = None

    def __post_init__(self) -> None:
        if self.n <= 0 or self.scale not in (None, 1, 100):
            raise ValueError(f"n must be positive and scale 1 or 100, not {self.n!r} and {self.scale!r}.")

    @property
    def standard_error(self) -> float:
        """Of a proportion of n examples; 0 where the metric is none."""
        if not self.scale or not 0 <= self.value <= self.scale:
            return 0.0
        share = self.value / self.scale
        return self.scale * math.sqrt(share * (1 - share) / self.n)

    def clearly_better(self, other: "Metric") -> bool:
        """Better by more than two standard errors where those are known (proportions), else better at all."""
        gain = (other.value - self.value) if self.lower_is_better else (self.value - other.value)
        return gain > 2 * math.hypot(self.standard_error, other.standard_error)

    def beats_chance(self, value: float | None = None) -> bool:
        """Whether a score, by default its own, is more than two standard errors above chance; True if that is unknown.

        >>> Metric(0.55, 277, 1, chance=0.527).beats_chance(), Metric(0.8, 277, 1, chance=0.527).beats_chance()
        (False, True)
        """
        if self.chance is None or not self.scale:
            return True
        share = self.chance / self.scale
        error = self.scale * math.sqrt((share * (1 - share) or 1) / self.n)  # 1: a correlation
        return (self.value if value is None else value) > self.chance + 2 * error


@dataclass(frozen=True, kw_only=True)
class Result:
    """What all kinds share. `model`: name of the base model; `checkpoint`: fingerprint of the folder the run saved."""

    file: str
    document: dict
    git: dict
    versions: dict
    hardware: dict
    model: str
    attention: Any
    seed: int
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        _check_attention(self.attention, f"{self.file}: attention")

    @property
    def machine(self) -> str:
        return machine(self.hardware)

    def _convert(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Result):
    """Kind "task", one per training run. `budget`: {epochs or steps, learning_rate, ...}, equal for runs that are
    compared. A document may also hold `transfer` ({steps, ...}: attention transfer before training, which the budget
    does not count), `history` ([{step, metrics, [stage]}, ...], stage: one of STAGES) and `command`.
    """

    base_license: str | None
    task: str
    task_type: str  # as the Hub calls it
    dataset: dict  # name, split, fingerprint, [config]
    metrics: dict
    main_metric: str = ""  # the first
    budget: dict
    samples_per_second: Number | None
    tokens_per_second: Number | None
    peak_memory_bytes: Number | None
    wall_time_seconds: Number | None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dataset(self.dataset, self.file)
        _check_positive(self, self.file)
        if not self.metrics:
            raise ValueError(f"{self.file}: metrics is empty; a result needs at least one metric.")
        self._convert("metrics", {k: _metric(k, v, f"{self.file}: metrics: {k}") for k, v in self.metrics.items()})
        self._convert("main_metric", self.main_metric or next(iter(self.metrics)))
        if self.main_metric not in self.metrics:
            raise ValueError(f"{self.file}: main_metric {self.main_metric!r} is none of {', '.join(self.metrics)}.")

    @property
    def measured_on(self) -> str:
        """Equal for results that can be compared."""
        return json.dumps([self.model, self.task, self.dataset, self.budget], sort_keys=True)


@dataclass(frozen=True)
class Timing:
    """A forward pass at one length."""

    length: int
    softmax_seconds: Number
    patched_seconds: Number
    softmax_peak_bytes: Number | None = None
    patched_peak_bytes: Number | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "lengths")

    @property
    def speed(self) -> float:
        """Over that of softmax."""
        return self.softmax_seconds / self.patched_seconds


@dataclass(frozen=True, kw_only=True)
class SpeedResult(Result):
    """Kind "speed", one per pair of models: a forward pass at each length."""

    batch: int
    dtype: str
    lengths: Sequence[Timing]

    def __post_init__(self) -> None:
        super().__post_init__()
        found = [_read(Timing, each, f"{self.file}: lengths[{i}]") for i, each in enumerate(self.lengths)]
        if not found or len({timing.length for timing in found}) < len(found):
            raise ValueError(f"{self.file}: lengths must be a list of measurements, one for each length.")
        self._convert("lengths", tuple(sorted(found, key=lambda timing: timing.length)))


@dataclass(frozen=True, kw_only=True)
class TransferResult(Result):
    """Kind "transfer", one per conversion without fine-tuning. `errors`: {before, after}, each {layers, overall,
    average}: relative errors against softmax by layer, and what plain averaging would give.
    """

    base_license: str | None
    dataset: dict
    transfer: dict  # steps, batch_size, ...
    errors: dict

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dataset(self.dataset, self.file)
        for when in ("before", "after"):
            found = self.errors.get(when)
            columns: list[Any] = [found.get(key) for key in LAYER_ERRORS] if isinstance(found, dict) else [None]
            if not all(isinstance(column, list) and len(column) == len(columns[0]) > 0 for column in columns):
                raise ValueError(f"{self.file}: errors: {when} needs {', '.join(LAYER_ERRORS)}, lists of one length.")
            if not all(_is_number(value) for column in columns[1:] for value in column):
                raise ValueError(f"{self.file}: errors: {when} must hold finite numbers.")


KINDS: dict[str, type[Result]] = {"task": TaskResult, "speed": SpeedResult, "transfer": TransferResult}


def read_results(folder: Path) -> list[Any]:
    """Every document in a folder, by file name and without paths, except those of benchmarks; none if it is missing."""
    documents = {path.name: read_result(path) for path in sorted(folder.glob("*.json"))}
    return [
        parse_result(without_folders(document), name)
        for name, document in documents.items()
        if not str(document.get("kind")).startswith("bench ")
    ]


def parse_result(document: Any, file: str = "result.json") -> Any:
    """A checked document, TaskResult, SpeedResult or TransferResult; ValueError says where something is wrong."""
    kind, version = (document.get(k) if isinstance(document, dict) else None for k in ("kind", "schema_version"))
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version {version!r} is not known here, only {SCHEMA_VERSION}.")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{file}: kind {kind!r} is not possible; choose from {', '.join(map(repr, KINDS))}.")
    return _read(KINDS[kind], document, file, file=file, document=document)


def _read(cls: type[Any], given: Any, where: str, **known: Any) -> Any:
    """A dataclass from a JSON object, each field checked against its type."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a JSON object, not {given!r}.")
    kinds = get_type_hints(cls)
    for field in fields(cls):
        if field.name in known or (field.default is not MISSING and given.get(field.name) is None):
            continue
        if field.name not in given:
            raise ValueError(f"{where} has no {field.name!r}; it has {', '.join(map(repr, given)) or 'nothing'}.")
        value, kind = given[field.name], kinds[field.name]
        if kind == Sequence[Timing]:
            kind = list
        number = not isinstance(value, bool) and isinstance(value, Number)
        fits = kind is Any or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
        if not fits or (number and not math.isfinite(value)):
            wanted = "a finite number" if kind in (Number, Number | None) else getattr(kind, "__name__", str(kind))
            raise ValueError(f"{where}: {field.name} must be {wanted}, not {value!r}.")
        known[field.name] = value
    try:
        return cls(**known)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def _metric(name: str, given: Any, where: str) -> Metric:
    if isinstance(given, dict):
        known = dict(KNOWN_METRICS.get(name, {}))
        if _is_number(given.get("value")) and abs(given["value"]) > 1:
            known.pop("scale", None)  # it may be in percent
        given = known | {key: value for key, value in given.items() if value is not None}
    return _read(Metric, given, where)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(measured: Any, where: str) -> None:
    """All numbers that were measured."""
    for name, kind in get_type_hints(type(measured)).items():
        value = getattr(measured, name)
        if kind in (Number, Number | None) and value is not None and value <= 0:
            raise ValueError(f"{where}: {name} must be above zero or null, not {value!r}.")


def _check_dataset(dataset: Mapping[str, Any], where: str) -> None:
    for name in ("name", "split", "fingerprint"):
        if not isinstance(dataset.get(name), str):
            raise ValueError(f"{where}: dataset has no {name!r}, which must be text.")


def _check_attention(attention: Any, where: str) -> None:
    """ "softmax", the document of a mechanism {"mechanism": ..., options}, or {"layers": {"0-5": either, ...}}."""
    configs = [attention]
    if isinstance(attention, Mapping) and "layers" in attention:
        layers = attention["layers"]
        if len(attention) > 1 or not isinstance(layers, Mapping) or not layers:
            raise ValueError(f"{where}: 'layers' stands alone, as in {{'layers': {{'0-5': ...}}}}.")
        for key in layers:
            if not re.fullmatch(r"\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*", key):
                raise ValueError(f"{where}: {key!r} does not name layers; write '3', '0-5' or '0-2,7'.")
        configs = [config for config in layers.values() if not isinstance(config, str)]
    for config in configs:
        mechanism = isinstance(config, Mapping) and isinstance(config.get("mechanism"), str)
        if config != SOFTMAX and not (mechanism and isinstance(config.get("far", []), (list, tuple))):
            raise ValueError(f"{where}: {config!r} is neither 'softmax' nor a mechanism, {{'mechanism': ..., ...}}.")
