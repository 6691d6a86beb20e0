"""Schema of the result documents that cards and comparisons read, by kind.

- "task": one training run or evaluation. Runs that are compared have the same `budget`. A document may also have
  `transfer` (attention transfer before training, not part of the budget) and `history`, a list of {step, metrics,
  [stage]} with a stage of STAGES.
- "speed": forward passes of a model and of its softmax version at each length.
- "transfer": attention transfer without fine-tuning. `errors` are relative to softmax, by layer, with those of plain
  averaging.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from .documents import SCHEMA_VERSION, machine, read_result, without_folders

SOFTMAX = "softmax"
STAGES = ("before training", "after transfer")  # evaluations before the first training step
NO_ATTENTION, NEAR, FAR = "control: no attention", "control: window alone", "far field of fmm alone"
CONTROLS = (NO_ATTENTION, NEAR)  # for comparison only


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_attention(value: Any) -> bool:
    """ "softmax", a mechanism {"mechanism": ..., options}, or {"layers": {"0-5": either, ...}}."""
    if not isinstance(value, dict):
        return bool(value == SOFTMAX)
    if "layers" in value:
        layers = value["layers"]
        return isinstance(layers, dict) and all(isinstance(e, str) or _is_attention(e) for e in layers.values())
    return isinstance(value.get("mechanism"), str) and isinstance(value.get("far", []), (list, tuple))


TEXT, OBJECT, NUMBER, POSITIVE = "text", "an object", "a finite number", "a positive number"
CHECKS: dict[str, Callable[[Any], bool]] = {  # by description in error messages
    TEXT: lambda value: isinstance(value, str),
    OBJECT: lambda value: isinstance(value, dict),
    NUMBER: _is_number,
    POSITIVE: lambda value: _is_number(value) and value > 0,
    "an integer": lambda value: type(value) is int,
    "true or false": lambda value: isinstance(value, bool),
    "'softmax' or a mechanism": _is_attention,
}
ANY = "*"  # any name; the object must have at least one
METRIC = {"value": NUMBER, "n": POSITIVE, "scale?": POSITIVE, "lower_is_better?": "true or false", "chance?": NUMBER}
DATASET = {"name": TEXT, "config?": TEXT, "split": TEXT, "fingerprint": TEXT}
TIMING = dict.fromkeys(("length", "softmax_seconds", "patched_seconds"), POSITIVE)
PEAKS = dict.fromkeys(("softmax_peak_bytes?", "patched_peak_bytes?"), POSITIVE)
ERRORS = {"layers": [TEXT], "overall": [NUMBER], "average": [NUMBER]}
SHARED = {  # `model`: name of the base model; `checkpoint`: fingerprint of the folder that the run saved
    **dict.fromkeys(("git", "versions", "hardware"), OBJECT),
    "attention": "'softmax' or a mechanism", "model": TEXT, "seed": "an integer", "checkpoint?": TEXT,
}  # fmt: skip
SCHEMA: dict[str, dict[str, Any]] = {  # by kind; fields with a question mark may be missing or null
    "task": {
        "base_license?": TEXT, "task": TEXT, "task_type": TEXT, "dataset": DATASET, "metrics": {ANY: METRIC},
        "main_metric?": TEXT, "budget": OBJECT,
        **dict.fromkeys(("samples_per_second?", "tokens_per_second?", "peak_memory_bytes?"), POSITIVE),
    },
    "speed": {"batch": POSITIVE, "dtype": TEXT, "lengths": [TIMING | PEAKS]},
    "transfer": {
        "base_license?": TEXT, "dataset": DATASET, "transfer": OBJECT, "errors": {"before": ERRORS, "after": ERRORS},
    },
}  # fmt: skip


def check(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError unless a JSON value has a shape: a key of CHECKS, [shape of all items] or {name: shape}.

    >>> check({"n": [3, "4"]}, {"n": ["an integer"]}, "x.json")
    Traceback (most recent call last):
    ValueError: x.json: n[1] must be an integer, not '4'.
    """
    if isinstance(shape, str):
        if not CHECKS[shape](value):
            raise ValueError(f"{where} must be {shape}, not {value!r}.")
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} must be a list with at least one item, not {value!r}.")
        for i, item in enumerate(value):
            check(item, shape[0], f"{where}[{i}]")
    elif not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {value!r}.")
    elif ANY in shape:
        if not value:
            raise ValueError(f"{where} is empty.")
        for name, item in value.items():
            check(item, shape[ANY], f"{where}: {name}")
    else:
        for name, inner in shape.items():
            required = not name.endswith("?")
            name = name.rstrip("?")
            if required and name not in value:
                raise ValueError(f"{where} has no {name!r}; its fields: {', '.join(map(repr, value)) or 'none'}.")
            if required or value.get(name) is not None:
                check(value[name], inner, f"{where}: {name}")


@dataclass(frozen=True)
class Metric:
    """`n`: number of examples. `scale`: the perfect score. `chance`: score of the best constant answer, if known."""

    value: float
    n: int
    scale: float | None = None
    lower_is_better: bool = False
    chance: float | None = None

    def beats_chance(self, value: float) -> bool:
        """Whether a score is more than two standard errors above chance; True if that is unknown.

        >>> Metric(0.55, 277, 1, chance=0.527).beats_chance(0.55), Metric(0.8, 277, 1, chance=0.527).beats_chance(0.8)
        (False, True)
        """
        if self.chance is None or not self.scale:
            return True
        share = self.chance / self.scale
        error = self.scale * math.sqrt((share * (1 - share) or 1) / self.n)  # 1: a correlation
        return value > self.chance + 2 * error


@dataclass(frozen=True)
class Result:
    """A validated document. Its fields are attributes; missing optional fields are None."""

    file: str
    document: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self.document[name]
        except KeyError:
            if f"{name}?" in SHARED | SCHEMA[self.document["kind"]]:
                return None
            raise AttributeError(f"{self.file} has no {name!r}.") from None

    @property
    def machine(self) -> str:
        return machine(self.document["hardware"])

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        names = [field.name for field in fields(Metric)]
        found = self.document["metrics"].items()
        return {name: Metric(**{k: given[k] for k in names if given.get(k) is not None}) for name, given in found}

    @property
    def main_metric(self) -> str:
        return self.document.get("main_metric") or next(iter(self.metrics))

    @property
    def score(self) -> Metric:
        return self.metrics[self.main_metric]

    @property
    def measured_on(self) -> str:
        """A key that is equal for task results that can be compared."""
        return json.dumps([self.document[name] for name in ("model", "task", "dataset", "budget")], sort_keys=True)


def parse_result(document: Any, file: str = "result.json") -> Result:
    """Validate a document and return it as a Result. Raises ValueError with the place of the first problem."""
    kind, version = (document.get(k) if isinstance(document, dict) else None for k in ("kind", "schema_version"))
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file}: unknown schema_version {version!r}; supported: {SCHEMA_VERSION}.")
    if not isinstance(kind, str) or kind not in SCHEMA:
        raise ValueError(f"{file}: unknown kind {kind!r}; supported: {', '.join(map(repr, SCHEMA))}.")
    check(document, SHARED | SCHEMA[kind], file)
    result = Result(file, document)
    if kind == "task" and result.main_metric not in result.metrics:
        raise ValueError(f"{file}: main_metric {result.main_metric!r} is not in metrics: {', '.join(result.metrics)}.")
    return result


def read_results(folder: Path) -> list[Result]:
    """Read all documents in a folder except those of benchmarks, by file name; paths in them are removed.

    Returns an empty list if there is no such folder.
    """
    documents = {path.name: read_result(path) for path in sorted(folder.glob("*.json"))}
    return [
        parse_result(without_folders(document), name)
        for name, document in documents.items()
        if not str(document.get("kind")).startswith("bench ")
    ]


def control_of(names: Sequence[str], others: Iterable[Sequence[str]]) -> str | None:
    """Return the kind of control that a row of a table is, given the `others`; None if it is not a control.

    `names`: the mechanisms of the row, from `hf_rfattn.mechanism_names_in`; empty for a row whose layers differ.

    >>> control_of(["average"], []), control_of(["favor+"], [[]]), control_of(["favor+"], [["fmm", "favor+"]])
    ('control: no attention', None, 'far field of fmm alone')
    """
    if list(names) in (["average"], ["band"]):
        return NO_ATTENTION if names[0] == "average" else NEAR
    far = {name for other in others if other[:1] == ["fmm"] for name in other[1:]}
    return FAR if len(names) == 1 and names[0] in far else None
