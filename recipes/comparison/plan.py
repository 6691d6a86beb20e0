"""The runs that a comparison asks for, every one of them checked before the first starts."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from finetune_glue import GlueOptions
from finetune_lm import LanguageOptions
from finetune_squad import SquadOptions
from finetune_text import TextOptions
from training.data import find_source
from training.models import load_config
from training.options import RunOptions, fields_as_arguments, parse_options
from training.order import check_share
from training.run import BUDGET

from hf_rfattn import build_mechanism
from hf_rfattn.results import SOFTMAX

from .configuration import BEFORE, Configuration, Part, Row, expand, read_configuration

RECIPES: dict[str, type[RunOptions]] = {
    "glue": GlueOptions, "snli": RunOptions, "squad": SquadOptions, "lm": LanguageOptions, "text": TextOptions,
}  # fmt: skip
FOLDER = Path(__file__).resolve().parents[1]
OURS = {"output", "resume", "overwrite", "seed", "attention", "attention_options"}  # what a comparison decides
OF_A_TASK = {*BUDGET, "epochs", "max_steps", "max_length", "max_train_samples", "max_eval_samples", "model", "data"}


@dataclass(frozen=True)
class Run:
    """One recipe in processes of its own. `place` is where its result stands in the report; None: nowhere."""

    name: str
    recipe: str
    words: tuple[str, ...]  # of the command line
    processes: int
    threads: int | None
    place: Mapping[str, Any] | None
    needs: str | None  # the name of a run that must have been made before

    @cached_property
    def options(self) -> RunOptions:
        return parse_options(RECIPES[self.recipe], self.words)

    @property
    def script(self) -> Path:
        return FOLDER / f"finetune_{self.recipe}.py"


@dataclass(frozen=True)
class Plan:
    title: str
    runs: tuple[Run, ...]
    keep_models: bool
    variables: Mapping[str, str]

    def portable(self, value: Any) -> Any:
        """Folders of this machine as `${name}` again, for result files."""
        if isinstance(value, str):
            for name, text in sorted(self.variables.items(), key=lambda each: -len(each[1])):
                if os.sep in text:
                    value = value.replace(text, f"${{{name}}}")
            return value
        if isinstance(value, Mapping):
            return {key: self.portable(each) for key, each in value.items()}
        return [self.portable(each) for each in value] if isinstance(value, (list, tuple)) else value


def read_plan(path: Path, output: Path, given: Mapping[str, str]) -> Plan:
    """The runs of a file, in order. What is wrong with any of them is a ValueError."""
    file = read_configuration(path, given, {"output": str(output), "recipes": str(FOLDER)})
    try:
        runs = [run for i, part in enumerate(file.tasks) for run in _runs_of(i, part, file, output)]
        names = [run.name for run in runs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} would be run twice; labels must differ.")
        for run in runs:
            _check_run(run)
        for options in {run.options.model: run.options for run in runs if run.needs is None}.values():
            if options.model:
                load_config(options)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return Plan(file.title, tuple(runs), file.keep_models, file.variables)


def folder_of(output: Path, name: str) -> Path:
    return output / "runs" / name


def _check_rows(rows: list[Row]) -> None:
    if SOFTMAX not in [row.fields["attention"] for row in rows]:
        raise ValueError("attention has no softmax, which all other rows are compared with.")
    for row in rows:
        if own := {name.replace("-", "_") for name in row.training} & OF_A_TASK:
            raise ValueError(
                f"the row {row.label!r} has its own {', '.join(sorted(own))}, but rows can only be compared if they "
                "share that. Set it for the task."
            )
        attention = row.fields["attention"]
        if attention != SOFTMAX:
            mechanism = build_mechanism({"mechanism": attention, **row.options}, num_heads=1, head_dim=8)
            if "mechanism_learning_rate" in row.training and not list(mechanism.parameters()):
                raise ValueError(f"{row.label!r} has no parameters for a mechanism_learning_rate.")


def _runs_of(number: int, part: Part, file: Configuration, output: Path) -> Iterator[Run]:
    """Its preparation, then all rows of a seed before the next seed: tables fill evenly."""
    labels = [row.label for row in file.attention]
    for label in [*(part.rows or ()), *part.options]:
        if label not in labels:
            raise ValueError(f"{part.label} wants the row {label!r}; there are {', '.join(labels)}.")
        if not isinstance(part.options.get(label, {}), Mapping):
            raise ValueError(f"{part.label}: options of {label!r} must be names with values.")
    rows = [
        dataclasses.replace(row, options={**row.options, **part.options.get(row.label, {})}) for row in file.attention
    ]
    _check_rows(rows)
    threads = part.threads or file.threads
    needs, folder = None, {}
    if part.before:
        needs = f"{_slug(part.label)}_{BEFORE}"
        folder = {BEFORE: str(folder_of(output, needs))}
        yield _run(needs, part.before.recipe, {**file.training, **part.before.training}, output, 1, threads)
    fields = expand({**file.training, **part.training}, folder, part.label)
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
        whole = {**fields, **row.fields, "seed": seed, **({} if length is None else {"max_length": length})}
        order = [number, rows.index(row)]
        place = {"part": part.label, "row": row.label, "order": order, "accuracy": part.accuracy}
        yield _run(name, part.recipe, whole, output, processes, threads, place, needs)


def _run(
    name: str,
    recipe: str,
    fields: Mapping[str, Any],
    output: Path,
    processes: int,
    threads: int | None,
    place: Mapping[str, Any] | None = None,
    needs: str | None = None,
) -> Run:
    if recipe not in RECIPES:
        raise ValueError(f"{name}: there is no recipe {recipe!r}; there are {', '.join(RECIPES)}.")
    words = fields_as_arguments(RECIPES[recipe], {**fields, "output": str(folder_of(output, name))}, name)
    return Run(name, recipe, tuple(words), processes, threads, place, needs)


def _slug(label: str) -> str:
    """
    >>> _slug("favor+, with transfer")
    'favor+-with-transfer'
    """
    return re.sub(r"[^\w+.-]+", "-", label).strip("-.") or "row"


def _check_run(run: Run) -> None:
    """What can be known without loading weights or data."""
    try:
        options = run.options
        check_share(options.batch_size, run.processes, options.accumulate)
        find_source(options.data, "owner/name", None, "sst2", None)
        if torch.accelerator.is_available() and run.processes > torch.accelerator.device_count():
            there = torch.accelerator.device_count()
            raise ValueError(f"{run.processes} processes need as many GPUs; there are {there}.")
    except ValueError as error:
        raise ValueError(f"{run.name}: {error}") from error
