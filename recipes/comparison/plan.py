"""Reads the YAML file of a comparison and checks all its runs before the first one starts.

title: ...              title of the report
variables: {data: null} values of `${data}` below; null values must be given with --set data=...; `${recipes}` and
                        `${output}`, the folder of the comparison, are always defined
training: {...}         recipe options of all runs
attention:              rows of the tables, including softmax
  - label: favor+       mechanism: by default the label; options: of the mechanism; training: recipe options
tasks:                  parts of the report
  - label: sst2         recipe: glue, snli, squad, text, lm or embeddings; training: recipe options; rows: labels to use
    before: {...}       recipe and training of a run that is executed first; `${before}` is its folder
    options: {...}      options of mechanisms in this task, by label: {fmm: {bandwidth: 32}}
seeds: [0, 1]           this and the next three can also be set in a task
lengths: [512, 2048]    values of --max-length, with a table each
processes: [1, 2]       numbers of processes per run, with a table each; or one number
threads: 1              threads per process on a CPU; default: OMP_NUM_THREADS, or the cores divided by the processes
keep_models: false      delete the models, keep the results
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import yaml
from evaluate_embeddings import EmbeddingOptions
from finetune_glue import GlueOptions
from finetune_lm import LanguageOptions
from finetune_squad import SquadOptions
from finetune_text import TextOptions
from training.classification import ClassificationOptions
from training.options import CommonOptions, assignments, did_you_mean, fields_as_arguments, parse_options
from training.run import BUDGET

from hf_rfattn import build_mechanism
from hf_rfattn.results.schema import SOFTMAX

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
SHARED = ("training", "seeds", "lengths", "processes", "threads")  # fields of the file and of a task
FILE = ("title", "variables", "attention", "tasks", "keep_models", *SHARED)
TASK = ("label", "recipe", BEFORE, "rows", "options", *SHARED)
ROW = ("label", "mechanism", "options", "training")
OURS = {"output", "resume", "overwrite", "seed", "attention", "attention_options"}  # set by the comparison
OF_A_TASK = {*BUDGET, "epochs", "max_steps", "max_length", "max_train_samples", "max_eval_samples", "model", "data"}


@dataclass(frozen=True)
class Run:
    """A run of a recipe. `place`: position of its result in the report; None if it is not shown."""

    name: str
    recipe: str
    words: tuple[str, ...]  # command-line arguments
    processes: int
    threads: int | None
    place: Mapping[str, Any] | None = None
    needs: str | None = None  # name of a run that must be finished first

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
    """Read and check all runs of a file. Raises ValueError if any of them is invalid."""
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}.")
    try:
        file = yaml.safe_load(path.read_text(encoding="utf-8"))
        check_names(file, FILE, "the file")
        named = file.get("variables") or {}
        check_names(given, list(named), "--set")
        variables = {name: given.get(name, default) for name, default in named.items()}
        if missing := [name for name, value in variables.items() if value in (None, "")]:
            raise ValueError(f"needs {' and '.join(f'--set {name}=...' for name in missing)}.")
        variables |= {"recipes": str(FOLDER), "output": str(output), BEFORE: f"${{{BEFORE}}}"}  # `${before}`: later
        file = expand(file, variables)
        runs = [run for i, task in enumerate(file["tasks"]) for run in _runs_of(i, task, file, output)]
        names = [run.name for run in runs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} would run twice; use different labels.")
        for run in runs:
            _ = run.options  # raises ValueError for invalid options
    except KeyError as error:
        raise ValueError(f"{path.name}: the field {error} is missing.") from error
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from error
    return Plan(file.get("title", "Comparison"), tuple(runs), file.get("keep_models", True))


def check_names(given: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} must be a mapping such as `label: favor+`, not {given!r}.")
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(f"{where}: unknown field {name!r}{hint}; known: {', '.join(known) or 'none'}.")


def expand(value: Any, variables: Mapping[str, Any]) -> Any:
    """Replace `${name}` by the values of variables in all strings.

    >>> expand({"data": "${data}/snli", "steps": 3}, {"data": "here"})
    {'data': 'here/snli', 'steps': 3}
    """
    if isinstance(value, str):
        try:
            return Template(value).substitute(variables)
        except KeyError as error:
            raise ValueError(f"{value!r}: unknown variable {error}; known: {', '.join(variables)}.") from error
    if isinstance(value, Mapping):
        return {key: expand(each, variables) for key, each in value.items()}
    return [expand(each, variables) for each in value] if isinstance(value, list) else value


def folder_of(output: Path, name: str) -> Path:
    return output / "runs" / name


def _runs_of(number: int, task: Any, file: Mapping[str, Any], output: Path) -> Iterator[Run]:
    """Runs of a task: `before`, then all rows of a seed before those of the next."""
    check_names(task, TASK, f"tasks[{number}]")
    part, recipe, needs, folder = task["label"], task["recipe"], None, {}
    defaults = {"seeds": [0], "lengths": [None], "processes": [1], "threads": None}
    own = {**defaults, **{name: value for name, value in file.items() if name in SHARED}, **task}
    if isinstance(own["processes"], int):
        own["processes"] = [own["processes"]]
    rows = [_row(row, task.get("options", {})) for row in file["attention"]]
    labels = [row["label"] for row in rows]
    if SOFTMAX not in [row["mechanism"] for row in rows]:
        raise ValueError("attention has no softmax row, which all others are compared with; add `- label: softmax`.")
    check_names(dict.fromkeys([*task.get("rows", ()), *task.get("options", ())]), labels, f"rows of {part}")
    shared = file.get("training", {})
    if BEFORE in task:
        needs = f"{_slug(part)}_{BEFORE}"
        folder = {BEFORE: str(folder_of(output, needs))}
        first = task[BEFORE].get("recipe", recipe)
        words = _words(needs, first, {**shared, **task[BEFORE]["training"]}, output)
        yield Run(needs, first, words, 1, own["threads"])
    fields = expand({**shared, **task.get("training", {})}, folder)
    for processes, seed, length, row in product(own["processes"], own["seeds"], own["lengths"], rows):
        if row["label"] in task.get("rows", labels):
            if theirs := OURS.intersection(name.replace("-", "_") for name in [*fields, *row["training"]]):
                raise ValueError(
                    f"{part}: the comparison sets {', '.join(sorted(theirs))} itself; remove it from `training`."
                )
            among = f", {processes} process{'es' if processes > 1 else ''}" if len(own["processes"]) > 1 else ""
            tokens = f"_{length}_tokens" if len(own["lengths"]) > 1 else ""
            name = f"{_slug(part + among)}_{_slug(row['label'])}{tokens}_seed_{seed}"
            decided = {"attention": row["mechanism"], "attention_options": assignments(row["options"]), "seed": seed}
            decided |= {"max_length": length} if length else {}
            words = _words(name, recipe, {**fields, **row["training"], **decided}, output)
            order = [number, own["processes"].index(processes), rows.index(row)]
            place = {"part": part + among, "row": row["label"], "order": order}
            yield Run(name, recipe, words, processes, own["threads"], place, needs)


def _row(row: Any, of_the_task: Mapping[str, Any]) -> dict[str, Any]:
    """Check a row and fill in its defaults."""
    check_names(row, ROW, "attention")
    label, training = row["label"], row.get("training", {})
    mechanism, options = row.get("mechanism", label), {**row.get("options", {}), **of_the_task.get(label, {})}
    if own := {name.replace("-", "_") for name in training} & OF_A_TASK:
        raise ValueError(
            f"the row {label!r} sets {', '.join(sorted(own))}, which must be the same in all rows. Set it in the task "
            "instead."
        )
    if mechanism != SOFTMAX:
        build_mechanism({"mechanism": mechanism, **options}, num_heads=1, head_dim=8)
    return {"label": label, "mechanism": mechanism, "options": options, "training": training}


def _words(name: str, recipe: str, fields: Mapping[str, Any], output: Path) -> tuple[str, ...]:
    if recipe not in RECIPES:
        raise ValueError(f"{name}: unknown recipe {recipe!r}; known: {', '.join(RECIPES)}.")
    return tuple(fields_as_arguments({**fields, "output": str(folder_of(output, name))}))


def _slug(label: str) -> str:
    """Convert a label to a file name.

    >>> _slug("favor+, with transfer")
    'favor+-with-transfer'
    """
    return re.sub(r"[^\w+.-]+", "-", label).strip("-.") or "row"
