"""What the result documents that cards and comparisons read must hold, and the check that they hold it.

All begin with what `new_result` gives. The fields of the classes below are those of the documents: one without a
default must be there, `| None` allows null. Documents may hold more, which stays in `Result.document`.
"""

import dataclasses
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from .documents import SCHEMA_VERSION, read_result, without_folders
from .environment import machine

SOFTMAX = "softmax"
STAGES = ("before training", "after transfer")  # evaluations of a run that has not begun to train
NOT_FOR_CARDS = "bench "  # how the kinds of other documents begin

_FRACTION, _CORRELATION, _LOSS = {"scale": 1}, {"scale": 1, "chance": 0.0}, {"lower_is_better": True}
KNOWN_METRICS: dict[str, dict[str, Any]] = {  # what documents may leave out
    **dict.fromkeys(("accuracy", "f1", "exact_match"), _FRACTION),
    **dict.fromkeys(("matthews_correlation", "pearson", "spearmanr"), _CORRELATION),
    **dict.fromkeys(("loss", "perplexity"), _LOSS),
}


def check_attention(attention: Any, where: str) -> None:
    """ "softmax", a mechanism's document {"mechanism": ..., options}, or {"layers": {"0-5": either, ...}}."""
    if isinstance(attention, Mapping) and "layers" in attention:
        layers = attention["layers"]
        if len(attention) > 1 or not isinstance(layers, Mapping) or not layers:
            raise ValueError(f"{where}: 'layers' stands alone, as in {{'layers': {{'0-5': ...}}}}.")
        for key, config in layers.items():
            if not re.fullmatch(r"\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*", key):
                raise ValueError(f"{where}: {key!r} does not name layers; write '3', '0-5' or '0-2,7'.")
            if not isinstance(config, str):
                _check_mechanism(config, where)
    elif attention != SOFTMAX:
        _check_mechanism(attention, where)


def _check_mechanism(config: Any, where: str) -> None:
    if not isinstance(config, Mapping) or not isinstance(config.get("mechanism"), str):
        raise ValueError(
            f"{where}: {config!r} is neither 'softmax' nor the document of a mechanism, {{'mechanism': ...}}."
        )
    if not isinstance(config.get("far", []), (list, tuple)):
        raise ValueError(f"{where}: far must be a list, not {config['far']!r}.")


def _check_positive(value: float, where: str) -> None:
    if value <= 0:
        raise ValueError(f"{where} must be above zero or null, not {value!r}.")


def _check_dataset(value: Mapping[str, Any], where: str) -> None:
    for name in ("name", "split", "fingerprint"):
        _value(str, _found(value, name, where), f"{where}: {name}")


Attention = Annotated[Any, check_attention]
Dataset = Annotated[Mapping[str, Any], _check_dataset]  # name, split, fingerprint, [config]
Positive = Annotated[float, _check_positive]


@dataclass(frozen=True)
class Metric:
    """`n`: examples. `scale`: what a perfect score is, `chance`: the score of the best constant answer, if known."""

    value: float
    n: Annotated[int, _check_positive]
    scale: float | None = None
    lower_is_better: bool = False
    chance: float | None = None

    def __post_init__(self) -> None:
        if self.scale not in (None, 1, 100):
            raise ValueError(f"scale must be 1 or 100, not {self.scale!r}.")

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
        """Whether a score, by default its own, is more than two standard errors above that of the best constant
        answer; True where that is not known.

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
    """What all kinds share. `model`: the base model's name; `checkpoint`: fingerprint of the folder the run saved."""

    file: str
    document: Mapping[str, Any]
    git: Mapping[str, Any]
    versions: Mapping[str, Any]
    hardware: Mapping[str, Any]
    model: str
    attention: Attention
    seed: int
    checkpoint: str | None = None

    @property
    def machine(self) -> str:
        return machine(self.hardware)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Result):
    """Kind "task", one a training run. `budget`: {epochs or steps, learning_rate, ...}, equal for runs that are
    compared. A document may also hold `transfer` ({steps, ...}: attention transfer before training, which the budget
    does not count), `history` ([{step, metrics, [stage]}, ...], stage: one of STAGES) and `command`.
    """

    base_license: str | None
    task: str
    task_type: str  # as the Hub calls it
    dataset: Dataset
    metrics: dict[str, Metric]
    main_metric: str = ""  # the first
    budget: Mapping[str, Any]
    samples_per_second: Positive | None
    tokens_per_second: Positive | None
    peak_memory_bytes: Positive | None
    wall_time_seconds: Positive | None

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError(f"{self.file}: metrics is empty; a result without a metric says nothing.")
        if not self.main_metric:
            object.__setattr__(self, "main_metric", next(iter(self.metrics)))
        if self.main_metric not in self.metrics:
            raise ValueError(f"{self.file}: main_metric {self.main_metric!r} is none of {', '.join(self.metrics)}.")

    @property
    def measured_on(self) -> str:
        """Equal for results that may stand in one table."""
        return json.dumps([self.model, self.task, self.dataset, self.budget], sort_keys=True)


@dataclass(frozen=True)
class Timing:
    length: int
    softmax_seconds: Positive
    patched_seconds: Positive
    softmax_peak_bytes: Positive | None = None
    patched_peak_bytes: Positive | None = None

    @property
    def speed(self) -> float:
        """Over that of softmax."""
        return self.softmax_seconds / self.patched_seconds


@dataclass(frozen=True, kw_only=True)
class SpeedResult(Result):
    """Kind "speed", one a pair of models: a forward pass at each length."""

    batch: int
    dtype: str
    lengths: tuple[Timing, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len({timing.length for timing in self.lengths}) < len(self.lengths):
            raise ValueError(f"{self.file}: lengths must be a list of measurements, one for each length.")
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths, key=lambda timing: timing.length)))


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors against softmax by layer; `average` is what plain averaging would give."""

    layers: tuple[str, ...]
    overall: tuple[float, ...]
    average: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.layers or not len(self.layers) == len(self.overall) == len(self.average):
            raise ValueError("layers, overall and average must be lists of one length, with an entry for each layer.")


@dataclass(frozen=True)
class Errors:
    before: LayerErrors
    after: LayerErrors


@dataclass(frozen=True, kw_only=True)
class TransferResult(Result):
    """Kind "transfer", one a conversion without fine-tuning."""

    base_license: str | None
    dataset: Dataset
    transfer: Mapping[str, Any]  # steps, batch_size, ...
    errors: Errors


KINDS: dict[str, type[Result]] = {"task": TaskResult, "speed": SpeedResult, "transfer": TransferResult}


def read_results(folder: Path) -> list[Result]:
    """Every document in a folder, by file name and without paths; those of benchmarks are left out. A folder that is
    missing has none.
    """
    documents = {path.name: read_result(path) for path in sorted(folder.glob("*.json"))}
    return [
        parse_result(without_folders(document), name)
        for name, document in documents.items()
        if not str(document.get("kind")).startswith(NOT_FOR_CARDS)
    ]


def parse_result(document: Any, file: str = "result.json") -> Any:
    """A checked document, TaskResult, SpeedResult or TransferResult; ValueError says where something is wrong."""
    _value(Mapping, document, file)
    version = _value(int, _found(document, "schema_version", file), f"{file}: schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version {version} is not known here, only {SCHEMA_VERSION}.")
    kind = _found(document, "kind", file)
    if not isinstance(kind, str) or kind not in KINDS:
        possible = ", ".join(map(repr, KINDS))
        raise ValueError(f"{file}: kind {kind!r} is not possible; it is {possible}, or begins with {NOT_FOR_CARDS!r}.")
    return _fields(KINDS[kind], document, file, {"file": file, "document": document})


def _fields(cls: type[Any], document: Mapping[str, Any], where: str, known: Mapping[str, Any] = {}) -> Any:
    """A dataclass out of a JSON object, each field checked against its type."""
    known = dict(known)
    kinds = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        optional = field.default is not dataclasses.MISSING
        if field.name in known or (optional and document.get(field.name) is None):
            continue
        known[field.name] = _value(kinds[field.name], _found(document, field.name, where), f"{where}: {field.name}")
    try:
        return cls(**known)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def _found(document: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in document:
        raise ValueError(f"{where} has no {name!r}; it has {', '.join(map(repr, document)) or 'nothing'}.")
    return document[name]


def _value(kind: Any, value: Any, where: str) -> Any:
    """The value, if it is of this type; objects become dataclasses and lists tuples."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found, check = _value(inside[0], value, where), inside[1]
        check(found, where)
        return found
    if origin in (Union, types.UnionType):
        return None if value is None else _value(inside[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _fields(kind, _value(Mapping, value, where), where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inside[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if kind == dict[str, Metric]:
        metrics = _value(Mapping, value, where)
        return {name: _metric(name, each, f"{where}: {name}") for name, each in metrics.items()}
    what, is_it = _SIMPLE[origin or kind]
    if not is_it(value):
        raise ValueError(f"{where} must be {what}, not {value!r}.")
    return value


def _metric(name: str, given: Any, where: str) -> Metric:
    document = {key: value for key, value in _value(Mapping, given, where).items() if value is not None}
    metric: Metric = _fields(Metric, document, where)
    known = KNOWN_METRICS.get(name, {})
    if "scale" in known and abs(metric.value) > 1:  # it may be in percent
        known = {key: value for key, value in known.items() if key != "scale"}
    return dataclasses.replace(metric, **{key: value for key, value in known.items() if key not in document})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str) and bool(value.strip())),
    int: ("a whole number", lambda value: _is_number(value) and isinstance(value, int)),
    float: ("a finite number", _is_number),
    Mapping: ("a JSON object", lambda value: isinstance(value, dict)),
    tuple: ("a list", lambda value: isinstance(value, list)),
}
