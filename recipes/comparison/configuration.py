"""The YAML file of a comparison.

title: ...              of the report
variables: {data: null} for `${data}` below; null must be given with --set data=...; `${output}` and `${recipes}`
                        are there by themselves
training: {...}         options of recipes that all runs share
attention:              the rows of the tables, softmax among them
  - label: favor+       mechanism: if it is not the label; options: of the mechanism; training: options of recipes
tasks:                  the parts of the report
  - label: sst2         recipe: glue, snli, squad or lm; training: its options; rows: labels, if not all of them
    before: {...}       recipe and training of a run that comes first; its folder is `${before}` in this task
    options: {...}      further options of mechanisms in this task, by label: {fmm: {bandwidth: 32}}
    accuracy: false     if its runs are too short to say anything but how fast they are
seeds: [0, 1]           these four also in a task, for that one alone
processes: [1, 2]
lengths: [128, 512]     values of --max-length
threads: 1              of each process on a CPU; default: OMP_NUM_THREADS if it is set, else the cores are shared
keep_models: false      if only results are wanted
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import yaml
from training.options import assignments, did_you_mean

BEFORE = "before"

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Row:
    """One attention."""

    label: str
    mechanism: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """As a recipe has them."""
        attention = {"attention": self.mechanism or self.label, "attention_options": assignments(self.options)}
        return {**self.training, **attention}


@dataclass(frozen=True)
class Before:
    """A run that a task needs first."""

    recipe: str
    training: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A task, and what of it is run. What is None is as in the file as a whole."""

    label: str
    recipe: str
    training: Mapping[str, Any] = field(default_factory=dict)
    before: Before | None = None
    rows: list[str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accuracy: bool = True
    seeds: list[int] | None = None
    processes: list[int] | None = None
    lengths: list[int] | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Configuration:
    attention: list[Row]
    tasks: list[Part]
    title: str = "Comparison"
    variables: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    processes: list[int] = field(default_factory=lambda: [1])
    lengths: list[int] | None = None
    threads: int | None = None
    keep_models: bool = True


def read_configuration(path: Path, given: Mapping[str, str], known: Mapping[str, str]) -> Configuration:
    """A checked file. `given`: values for its variables; `known`: variables that every file has."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no file {str(path)!r}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    where = path.name
    variables = {**_variables(document, given, where), **known}
    fields = expand(document, {**variables, BEFORE: f"${{{BEFORE}}}"}, where)  # which has a value later
    file = _entry(Configuration, fields, where)
    parts = []
    for i, each in enumerate(file.tasks):
        part = _entry(Part, each, f"{where}: tasks[{i}]")
        before = None if part.before is None else _entry(Before, part.before, f"{where}: tasks[{i}]: {BEFORE}")
        parts.append(dataclasses.replace(part, before=before))
    rows = [_entry(Row, each, f"{where}: attention[{i}]") for i, each in enumerate(file.attention)]
    return dataclasses.replace(file, attention=rows, tasks=parts, variables=variables)


def _variables(document: Any, given: Mapping[str, str], where: str) -> dict[str, str]:
    named = document.get("variables") if isinstance(document, Mapping) else None
    if not isinstance(named, Mapping):
        named = {}
    for name in given:
        if name not in named:
            raise ValueError(f"--set {name}: {where} has no such variable; it has {', '.join(named) or 'none'}.")
    variables = {name: given.get(name, default) for name, default in named.items()}
    if missing := [name for name, value in variables.items() if value in (None, "")]:
        raise ValueError(f"{where} needs {' and '.join(f'--set {name}=...' for name in missing)}.")
    return {name: str(value) for name, value in variables.items()}


def expand(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """With every `${name}` replaced.

    >>> expand({"data": "${data}/snli", "steps": 3}, {"data": "here"}, "file.yaml")
    {'data': 'here/snli', 'steps': 3}
    """
    if isinstance(value, str):
        try:
            return Template(value).substitute(variables)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{where}: {value!r}: no variable {error}; known: {', '.join(variables)}.") from error
    if isinstance(value, Mapping):
        return {key: expand(each, variables, where) for key, each in value.items()}
    return [expand(each, variables, where) for each in value] if isinstance(value, list) else value


def _entry(kind: type[Entry], given: Any, where: str) -> Entry:
    """A dataclass out of a mapping, its keys and values checked."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must hold fields, as in `label: favor+`, not {given!r}.")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in given.items():
        if key not in fields:
            hint = did_you_mean(str(key), list(fields))
            raise ValueError(f"{where}: unknown field {key!r}{hint}; known: {', '.join(fields)}.")
        _check(key, value, where)
    for name, each in fields.items():
        if name not in given and each.default is each.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no {name!r}.")
    return kind(**given)


def _check(name: str, value: Any, where: str) -> None:
    def whole(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number >= (0 if name == "seeds" else 1)

    if name in ("seeds", "processes", "lengths"):
        fine, kind = isinstance(value, list) and value and all(map(whole, value)), "a list of numbers, as in [1, 2]"
    elif name in ("attention", "tasks", "rows"):
        fine, kind = isinstance(value, list) and value, "a list"
    elif name in ("training", "options", "variables", BEFORE):
        fine, kind = isinstance(value, Mapping), "fields with values"
    elif name in ("accuracy", "keep_models"):
        fine, kind = isinstance(value, bool), "true or false"
    elif name == "threads":
        fine, kind = whole(value), "a whole number above 0"
    else:
        fine, kind = isinstance(value, str) and value, "text"
    if not fine:
        raise ValueError(f"{where}: {name} must be {kind}, not {value!r}.")
