"""Model cards: what a checkpoint is and what was measured, from its config and result documents and nothing else."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..mechanisms.naming import mechanism_names_in
from ..results import (
    RESULTS,
    Result,
    SpeedResult,
    TaskResult,
    TransferResult,
    as_markdown,
    read_result,
    read_results,
    without_folders,
    write_images,
    write_result,
    write_whole,
)
from .card_text import card_text
from .findings import Comparison, compare, speeds
from .folder import CARD, PLOT, CheckpointFolder

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # of a model or a data set; folders have no owner
FINGERPRINT, RESULTS_FINGERPRINT = "rfattn_checkpoint_sha256", "rfattn_results_sha256"
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


@dataclass(frozen=True)
class Card:
    """All that a card says, before it is text."""

    folder: CheckpointFolder
    comparisons: Sequence[Comparison]
    timings: Sequence[SpeedResult]
    transfers: Sequence[TransferResult]
    base_model: str | None
    license: str | None
    address: str  # what readers give from_pretrained

    @property
    def title(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def used(self) -> list[Result]:
        """The results of this checkpoint."""
        return [*(comparison.own for comparison in self.comparisons), *self.timings, *self.transfers]

    @property
    def has_plot(self) -> bool:
        return bool(self.comparisons or self.timings)

    @property
    def base_on_hub(self) -> bool:
        return bool(self.base_model and HUB_NAME.fullmatch(self.base_model))

    @property
    def loader(self) -> str:
        return auto_class(self.folder.architecture)

    @property
    def mechanisms(self) -> list[str]:
        return mechanism_names_in({"layers": self.folder.spec["layers"]})

    @property
    def evaluations(self) -> list[EvalResult]:
        """The rows of this checkpoint, and of no other."""
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
            for own in (comparison.own for comparison in self.comparisons)
            for name, metric in own.metrics.items()
        ]

    @property
    def metadata(self) -> ModelCardData:
        own = [comparison.own for comparison in self.comparisons]
        base = self.base_model if self.base_on_hub else None
        datasets = [result.dataset["name"] for result in own if HUB_NAME.fullmatch(result.dataset["name"])]
        data = ModelCardData(
            model_name=self.title if own else None,
            eval_results=self.evaluations or None,
            base_model=base,
            base_model_relation="finetune" if base else None,
            library_name="transformers",
            license=self.license,
            pipeline_tag=PIPELINES.get(self.loader),
            tags=["hf_rfattn", "linear-attention", *self.mechanisms],
            datasets=list(dict.fromkeys(datasets)) or None,
            metrics=list(dict.fromkeys(name for result in own for name in result.metrics)) or None,
        )
        data[FINGERPRINT] = self.folder.fingerprint
        data[RESULTS_FINGERPRINT] = self.folder.results_fingerprint
        return data


def write_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> Path:
    """Write README.md and, if something was measured, results.png into a checkpoint's folder.

    Results are read from its folder results/. `repo_id`: where it will be published. `base_model` and `license`: for a
    checkpoint without results; results that say otherwise raise ValueError. Paths in result files shrink to names.
    """
    for path, document in unclean_results(Path(folder)):
        write_result(document, path)
    card = make_card(folder, repo_id=repo_id, base_model=base_model, license=license)
    plot = card.folder.path / PLOT
    plot.unlink(missing_ok=True)  # in the cache of the Hub it may be a link to what others read
    write_images(card_text(card), card.folder.path)
    path = card.folder.path / CARD
    write_whole(render(card), path)
    return path


def unclean_results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Result files that say where something lies on the machine they come from, and what they hold without that."""
    found = [(path, read_result(path)) for path in (folder / RESULTS).glob("*.json")]
    clean = [(path, document, without_folders(document)) for path, document in found]
    return [(path, after) for path, before, after in clean if before != after]


def make_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> Card:
    """What the card of this folder says now."""
    checkpoint = CheckpointFolder(Path(folder))
    results = read_results(checkpoint.path / RESULTS)
    comparisons, timings = compare(checkpoint, results), speeds(checkpoint, results)
    transfers = [r for r in results if isinstance(r, TransferResult) and checkpoint.holds(r.attention)]
    used: list[Result] = [*(comparison.own for comparison in comparisons), *timings, *transfers]
    licences = [result.base_license for result in used if isinstance(result, (TaskResult, TransferResult))]
    return Card(
        folder=checkpoint,
        comparisons=comparisons,
        timings=timings,
        transfers=transfers,
        base_model=_one("base model", [base_model, *(result.model for result in used)]),
        license=_one("licence", [license, *licences]),
        address=repo_id or checkpoint.path.resolve().name,
    )


def _one(what: str, values: Sequence[str | None]) -> str | None:
    found = list(dict.fromkeys(value for value in values if value is not None))
    if len(found) > 1:
        raise ValueError(f"The card needs one {what}, but there are several: {', '.join(found)}.")
    return found[0] if found else None


def render(card: Card) -> str:
    """The card as Markdown with its metadata on top."""
    return str(ModelCard(f"---\n{card.metadata.to_yaml()}\n---\n\n{as_markdown(card_text(card))}"))


def auto_class(architecture: str | None) -> str:
    """The class to load it with: an Auto class where the name tells which.

    >>> auto_class("BertForSequenceClassification"), auto_class("GPT2LMHeadModel"), auto_class("BertModel")
    ('AutoModelForSequenceClassification', 'AutoModelForCausalLM', 'AutoModel')
    """
    import transformers

    if architecture is None or (architecture.endswith("Model") and not architecture.endswith("LMHeadModel")):
        return "AutoModel"
    head = "CausalLM" if architecture.endswith("LMHeadModel") else architecture.rpartition("For")[2]
    name = f"AutoModelFor{head}"
    return name if hasattr(transformers, name) else architecture
