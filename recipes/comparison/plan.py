"""The YAML file of a comparison, and the runs it asks for, all checked before the first one starts.

title: ...              of the report
variables: {data: null} for `${data}` below; null must be given with --set data=...; `${output}` and `${recipes}`
                        are always defined
training: {...}         options of recipes that all runs share
attention:              the rows of the tables, softmax among them
  - label: favor+       mechanism: if it is not the label; options: of the mechanism; training: options of recipes
tasks:                  the parts of the report
  - label: sst2         recipe: glue, snli, squad, text, lm, embeddings; training: its options; rows: labels, if not all
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
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from string import Template
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from evaluate_embeddings import EmbeddingOptions
from finetune_glue import GlueOptions
from finetune_lm import LanguageOptions
from finetune_squad import SquadOptions
from finetune_text import TextOptions
from training.classification import ClassificationOptions
from training.data import find_source
from training.models import read_config
from training.options import CommonOptions, assignments, did_you_mean, fields_as_arguments, parse_options
from training.run import BUDGET
from training.task import check_share

from hf_rfattn import build_mechanism
from hf_rfattn.results import SOFTMAX

RECIPES: dict[str, tuple[str, type[CommonOptions]]] = {
    "glue": ("finetune_glue.py", GlueOptions),
    "snli": ("finetune_snli.py", ClassificationOptions),
    "squad": ("finetune_squad.py", SquadOptions),
    "text": ("finetune_text.py", TextOptions),
    "lm": ("finetune_lm.py", LanguageOptions),
    "embeddings": ("evaluate_embeddings.py", EmbeddingOptions),
}
FOLDER = Path(__file__).resolve().parents[1]
BEFORE = "before"
OURS = {"output", "resume", "overwrite", "seed", "attention", "attention_options"}  # what a comparison decides
OF_A_TASK = {*BUDGET, "epochs", "max_steps", "max_length", "max_train_samples", "max_eval_samples", "model", "data"}

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Row:
    """One attention."""

    label: str
    mechanism: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> str:
        return self.mechanism or self.label


@dataclass(frozen=True)
class Part:
    """A task, and what of it is run. What is None is as in the file as a whole."""

    label: str
    recipe: str
    training: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] | None = None
    rows: list[str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accuracy: bool = True
    seeds: list[int] | None = None
    processes: list[int] | None = None
    lengths: list[int] | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Configuration:
    attention: list[Any]
    tasks: list[Any]
    title: str = "Comparison"
    variables: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    processes: list[int] = field(default_factory=lambda: [1])
    lengths: list[int] | None = None
    threads: int | None = None
    keep_models: bool = True


@dataclass(frozen=True)
class Run:
    """One recipe in processes of its own. `place` is where its result stands in the report; None: nowhere."""

    name: str
    recipe: str
    words: tuple[str, ...]  # of the command line
    processes: int
    threads: int | None
    place: Mapping[str, Any] | None = None
    needs: str | None = None  # the name of a run that must have been made before

    @cached_property
    def options(self) -> Any:
        return parse_options(RECIPES[self.recipe][1], self.words)

    @property
    def script(self) -> Path:
        return FOLDER / RECIPES[self.recipe][0]


@dataclass(frozen=True)
class Plan:
    title: str
    runs: tuple[Run, ...]
    keep_models: bool


def read_plan(path: Path, output: Path, given: Mapping[str, str]) -> Plan:
    """The runs of a file, in order. What is wrong with any of them is a ValueError."""
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}.")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        variables = _variables(document, given) | {"output": str(output), "recipes": str(FOLDER)}
        fields = expand(document, {**variables, BEFORE: f"${{{BEFORE}}}"})  # which has a value later
        file = _entry(Configuration, fields, "the file")
        rows = [_entry(Row, each, f"attention[{i}]") for i, each in enumerate(file.attention)]
        parts = [_entry(Part, each, f"tasks[{i}]") for i, each in enumerate(file.tasks)]
        runs = [run for i, part in enumerate(parts) for run in _runs_of(i, part, rows, file, output)]
        names = [run.name for run in runs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} would be run twice; labels must differ.")
        for run in runs:
            _check_run(run)
        for model in {run.options.model for run in runs if run.needs is None and run.options.model}:
            read_config("--model", model)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return Plan(file.title, tuple(runs), file.keep_models)


def _variables(document: Any, given: Mapping[str, str]) -> dict[str, str]:
    """Those of the file, with what --set says."""
    named = (document.get("variables") if isinstance(document, Mapping) else None) or {}
    for name in given:
        if name not in named:
            raise ValueError(f"--set {name}: there is no such variable; there are {', '.join(named) or 'none'}.")
    variables = {name: given.get(name, default) for name, default in named.items()}
    if missing := [name for name, value in variables.items() if value in (None, "")]:
        raise ValueError(f"needs {' and '.join(f'--set {name}=...' for name in missing)}.")
    return {name: str(value) for name, value in variables.items()}


def expand(value: Any, variables: Mapping[str, str]) -> Any:
    """With every `${name}` replaced.

    >>> expand({"data": "${data}/snli", "steps": 3}, {"data": "here"})
    {'data': 'here/snli', 'steps': 3}
    """
    if isinstance(value, str):
        try:
            return Template(value).substitute(variables)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{value!r}: no variable {error}; known: {', '.join(variables)}.") from error
    if isinstance(value, Mapping):
        return {key: expand(each, variables) for key, each in value.items()}
    return [expand(each, variables) for each in value] if isinstance(value, list) else value


def _entry(kind: type[Entry], given: Any, where: str) -> Entry:
    """A dataclass out of a mapping, its keys and the types of its values checked."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must hold fields, as in `label: favor+`, not {given!r}.")
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in hints:
            hint = did_you_mean(str(key), list(hints))
            raise ValueError(f"{where}: unknown field {key!r}{hint}; known: {', '.join(hints)}.")
        several = get_origin(hints[key]) in (Union, types.UnionType)
        possible = [get_origin(each) or each for each in (get_args(hints[key]) if several else [hints[key]])]
        if not isinstance(value, tuple(possible)):
            names = " or ".join(each.__name__ for each in possible)
            raise ValueError(f"{where}: {key} must be of type {names}, not {value!r}.")
    try:
        return kind(**given)
    except TypeError as error:  # a field is missing
        raise ValueError(f"{where}: {error}") from error


def folder_of(output: Path, name: str) -> Path:
    return output / "runs" / name


def _check_row(row: Row) -> None:
    """Rows share the budget of their task, and their mechanisms exist."""
    if own := {name.replace("-", "_") for name in row.training} & OF_A_TASK:
        raise ValueError(
            f"the row {row.label!r} has its own {', '.join(sorted(own))}, but rows can only be compared if they share "
            "that. Set it for the task."
        )
    if row.attention != SOFTMAX:
        mechanism = build_mechanism({"mechanism": row.attention, **row.options}, num_heads=1, head_dim=8)
        if "mechanism_learning_rate" in row.training and not list(mechanism.parameters()):
            raise ValueError(f"{row.label!r} has no parameters for a mechanism_learning_rate.")


def _runs_of(number: int, part: Part, rows: list[Row], file: Configuration, output: Path) -> Iterator[Run]:
    """Its preparation, then all rows of a seed before the next seed: tables fill evenly."""
    labels = [row.label for row in rows]
    if SOFTMAX not in [row.attention for row in rows]:
        raise ValueError("attention has no softmax, which all other rows are compared with.")
    if unknown := [label for label in [*(part.rows or ()), *part.options] if label not in labels]:
        raise ValueError(f"{part.label} wants the row {unknown[0]!r}; there are {', '.join(labels)}.")
    rows = [dataclasses.replace(row, options={**row.options, **part.options.get(row.label, {})}) for row in rows]
    for row in rows:
        _check_row(row)
    threads, needs, folder = part.threads or file.threads, None, {}
    if part.before is not None:
        needs = f"{_slug(part.label)}_{BEFORE}"
        folder = {BEFORE: str(folder_of(output, needs))}
        before = {**file.training, **part.before.get("training", {})}
        recipe = part.before.get("recipe", part.recipe)
        yield Run(needs, recipe, _words(needs, recipe, before, output), 1, threads)
    fields = expand({**file.training, **part.training}, folder)
    lengths: list[int | None] = [*(part.lengths or file.lengths or [None])]
    several = part.processes or file.processes
    for seed, length, processes, row in product(part.seeds or file.seeds, lengths, several, rows):
        if part.rows and row.label not in part.rows:
            continue
        if theirs := OURS.intersection(name.replace("-", "_") for name in [*fields, *row.training]):
            raise ValueError(f"{part.label}: {', '.join(sorted(theirs))} cannot be set as training options.")
        name = "_".join(
            [_slug(part.label), _slug(row.label)]
            + ([f"{length}_tokens"] if len(lengths) > 1 else [])
            + ([f"{processes}_processes"] if len(several) > 1 else [])
            + [f"seed_{seed}"]
        )
        own = {"attention": row.attention, "attention_options": assignments(row.options), "seed": seed}
        whole = {**fields, **row.training, **own, **({} if length is None else {"max_length": length})}
        place = {"part": part.label, "row": row.label, "order": [number, rows.index(row)], "accuracy": part.accuracy}
        yield Run(name, part.recipe, _words(name, part.recipe, whole, output), processes, threads, place, needs)


def _words(name: str, recipe: str, fields: Mapping[str, Any], output: Path) -> tuple[str, ...]:
    if recipe not in RECIPES:
        raise ValueError(f"{name}: there is no recipe {recipe!r}; there are {', '.join(RECIPES)}.")
    return tuple(fields_as_arguments(RECIPES[recipe][1], {**fields, "output": str(folder_of(output, name))}, name))


def _slug(label: str) -> str:
    """
    >>> _slug("favor+, with transfer")
    'favor+-with-transfer'
    """
    return re.sub(r"[^\w+.-]+", "-", label).strip("-.") or "row"


def _check_run(run: Run) -> None:
    """What can be known without loading weights or data."""
    try:
        check_share(run.options.batch_size, run.processes, getattr(run.options, "accumulate", 1))
        find_source(run.options.data, "owner/name", None, None)
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from error
