"""Model cards: what a checkpoint is and what was measured, from its config and result documents and nothing else."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..mechanisms.naming import mechanism_names_in
from ..results import (
    CONTROLS,
    FAR,
    NEAR,
    NO_ATTENTION,
    RESULTS,
    SOFTMAX,
    Result,
    as_markdown,
    control_of,
    number,
    read_result,
    read_results,
    results_fingerprint,
    without_folders,
    write_result,
    write_whole,
)
from .card_text import card_text
from .folder import CARD, CheckpointFolder

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # of a model or a data set; folders have no owner
FINGERPRINT, RESULTS_FINGERPRINT = "rfattn_checkpoint_sha256", "rfattn_results_sha256"
PIPELINES = {  # by how the name of a model class ends
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
THIS, OTHER_SEED, SAME_BUDGET, OTHER = "this model", "another run", "softmax, same budget", "another mechanism"
ORDER = [THIS, OTHER_SEED, SAME_BUDGET, FAR, NEAR, NO_ATTENTION, OTHER]

Comparison = list[tuple[str, Result]]  # roles and results of one task, data and budget; the first is the model's


@dataclass(frozen=True)
class Card:
    """All that a card says, before it is text."""

    folder: CheckpointFolder
    comparisons: Sequence[Comparison]
    timings: Sequence[Result]
    transfers: Sequence[Result]
    base_model: str | None
    license: str | None
    address: str  # what readers give from_pretrained

    @property
    def own(self) -> list[Result]:
        """The task results of this checkpoint, and of no other."""
        return [comparison[0][1] for comparison in self.comparisons]

    @property
    def used(self) -> list[Result]:
        return [*self.own, *self.timings, *self.transfers]

    @property
    def base_on_hub(self) -> bool:
        return bool(self.base_model and HUB_NAME.fullmatch(self.base_model))

    @property
    def mechanisms(self) -> list[str]:
        return mechanism_names_in({"layers": self.folder.spec["layers"]})

    @property
    def evaluations(self) -> list[EvalResult]:
        return [
            EvalResult(
                task_type=own.task_type,
                task_name=own.task,
                dataset_type=own.dataset["name"],
                dataset_name=" ".join(filter(None, [own.dataset["name"], own.dataset.get("config")])),
                dataset_config=own.dataset.get("config"),
                dataset_split=own.dataset["split"],
                metric_type=name,
                metric_name=name,
                metric_value=metric.value,
            )
            for own in self.own
            for name, metric in own.metrics.items()
        ]

    @property
    def metadata(self) -> ModelCardData:
        base = self.base_model if self.base_on_hub else None
        datasets = [own.dataset["name"] for own in self.own if HUB_NAME.fullmatch(own.dataset["name"])]
        data = ModelCardData(
            model_name=self.address.rpartition("/")[2] if self.own else None,
            eval_results=self.evaluations or None,
            base_model=base,
            base_model_relation="finetune" if base else None,
            library_name="transformers",
            license=self.license,
            pipeline_tag=next((tag for end, tag in PIPELINES.items() if self.folder.architecture.endswith(end)), None),
            tags=["hf_rfattn", "efficient-attention", *self.mechanisms],
            datasets=list(dict.fromkeys(datasets)) or None,
            metrics=list(dict.fromkeys(name for own in self.own for name in own.metrics)) or None,
        )
        data[FINGERPRINT] = self.folder.fingerprint
        data[RESULTS_FINGERPRINT] = results_fingerprint(self.folder.path)
        return data

    def limitations(self) -> Iterator[str]:
        """Softmax and controls that the model does not beat, and what was not measured."""
        for (_, own), *others in self.comparisons:
            for name, metric in own.metrics.items():
                better = [
                    f"{role} ({number(other.metrics[name].value)}, seed {other.seed})"
                    for role, other in others
                    if role not in (OTHER, OTHER_SEED)
                    and name in other.metrics
                    and not metric.clearly_better(other.metrics[name])
                ]
                if not metric.beats_chance():
                    better.append(f"the best constant answer ({number(metric.chance or 0)})")
                if better:
                    yield f"{own.task}: {name} {number(metric.value)} is not clearly better than {', '.join(better)}."
            if missing := [role for role in CONTROLS if role not in dict(others)]:
                yield f"{own.task}: not measured: {'; '.join(missing)}."
        if not self.comparisons:
            yield "No accuracy was measured."
        if not self.timings:
            yield "No speed was measured."

    def render(self) -> str:
        """The card as Markdown with its metadata on top."""
        return str(ModelCard(f"---\n{self.metadata.to_yaml()}\n---\n\n{as_markdown(card_text(self))}"))


def write_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> Path:
    """Write the model card, README.md, into a checkpoint's folder.

    Results are read from its folder results/. `repo_id`: where it will be published. `base_model` and `license`: for a
    checkpoint without results; results that say otherwise raise ValueError. Paths in result files shrink to names.
    """
    for path, document in unclean_results(Path(folder)):
        write_result(document, path)
    card = make_card(folder, repo_id=repo_id, base_model=base_model, license=license)
    write_whole(card.render(), card.folder.path / CARD)
    return card.folder.path / CARD


def unclean_results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Result files with paths of the machine they come from, and what they hold without those."""
    found = [(path, read_result(path)) for path in (folder / RESULTS).glob("*.json")]
    return [(path, clean) for path, document in found if (clean := without_folders(document)) != document]


def make_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> Card:
    """What the card of this folder says now."""
    checkpoint = CheckpointFolder(Path(folder))
    results = read_results(checkpoint.path / RESULTS)
    own = [result for result in results if checkpoint.holds(result.attention)]
    timings = [r for r in own if r.kind == "speed" and r.checkpoint in (None, checkpoint.fingerprint)]
    transfers = [result for result in own if result.kind == "transfer"]
    comparisons = list(_compare(checkpoint, [result for result in results if result.kind == "task"]))
    described = [*(comparison[0][1] for comparison in comparisons), *transfers]
    return Card(
        folder=checkpoint,
        comparisons=comparisons,
        timings=timings,
        transfers=transfers,
        base_model=_one("base model", [base_model, *(result.model for result in [*described, *timings])]),
        license=_one("licence", [license, *(result.base_license for result in described)]),
        address=repo_id or checkpoint.path.resolve().name,
    )


def _compare(folder: CheckpointFolder, results: Sequence[Result]) -> Iterator[Comparison]:
    """One comparison for each task that this checkpoint was measured on."""
    for group in {result.measured_on: None for result in results}:
        rows = [result for result in results if result.measured_on == group]
        same = [result for result in rows if folder.holds(result.attention)]
        named = [result for result in same if result.checkpoint == folder.fingerprint]
        possible = named or [result for result in same if result.checkpoint is None]
        if len(possible) > 1:
            raise ValueError(
                f"{', '.join(r.file for r in possible)}: any of these runs may have made {folder.path}. Give the one "
                f'that did "checkpoint": "{folder.fingerprint}", or leave one file.'
            )
        if possible:
            roles = [(_role(result, possible[0], same), result) for result in rows]
            yield sorted(roles, key=lambda row: (ORDER.index(row[0]), row[1].seed))


def _role(result: Result, own: Result, same: Sequence[Result]) -> str:
    if result in same:
        return THIS if result is own else OTHER_SEED
    if result.attention == SOFTMAX:
        return SAME_BUDGET
    return control_of(_names(result), [_names(own)]) or OTHER


def _names(result: Result) -> list[str]:
    """Mechanisms of a row whose layers are alike."""
    mixed = isinstance(result.attention, Mapping) and "layers" in result.attention
    return [] if mixed else mechanism_names_in(result.attention)


def _one(what: str, values: Sequence[str | None]) -> str | None:
    found = list(dict.fromkeys(value for value in values if value is not None))
    if len(found) > 1:
        raise ValueError(f"The card needs one {what}, but there are several: {', '.join(found)}.")
    return found[0] if found else None
