"""Model cards: what a checkpoint is and what was measured, from its config and result documents and nothing else."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..commands import in_bytes
from ..results import (
    RESULTS,
    Result,
    SpeedResult,
    TaskResult,
    TransferResult,
    number,
    read_results,
    without_folders,
    write_result,
    write_whole,
)
from .citations import cite
from .comparison import Comparison, compare, crossover, limitations, speeds
from .folder import CARD, PLOT, CheckpointFolder, attention_label, full_config, mechanism_names_in
from .plots import plot_results

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
        base = self.base_model if self.base_model and HUB_NAME.fullmatch(self.base_model) else None
        datasets = [result.dataset["name"] for result in own if HUB_NAME.fullmatch(result.dataset["name"])]
        data = ModelCardData(
            model_name=self.title if own else None,
            eval_results=self.evaluations or None,
            base_model=base,
            base_model_relation="finetune" if base else None,
            library_name="transformers",
            license=self.license,
            pipeline_tag=PIPELINES.get(auto_class(self.folder.architecture)),
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
    if card.comparisons or card.timings:
        plot_results(card.comparisons, card.timings, plot)
    path = card.folder.path / CARD
    write_whole(render(card), path)
    return path


def unclean_results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Result files that say where something lies on the machine they come from, and what they hold without that."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in (folder / RESULTS).glob("*.json")]
    return [
        (path, without_folders(document))
        for path, document in found
        if isinstance(document, dict) and without_folders(document) != document
    ]


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
    spec = card.folder.spec
    return str(
        ModelCard.from_template(
            card.metadata,
            template_str=files(__package__).joinpath("card_template.md").read_text(encoding="utf-8"),
            title=card.title,
            summary=_summary(card),
            layers=_layer_rows(card.folder),
            cross_attention="replaced as well" if spec.get("cross_attention") else "softmax, where there is any",
            mechanism_seed=spec.get("seed"),
            loader=auto_class(card.folder.architecture),
            has_tokenizer=(card.folder.path / "tokenizer_config.json").exists(),
            address=card.address,
            plot=PLOT if card.comparisons or card.timings else None,
            comparisons=[_task_table(comparison) for comparison in card.comparisons],
            speeds=[_speed_table(speed) for speed in card.timings],
            transfers=[_transfer_table(transfer) for transfer in card.transfers],
            limitations=limitations(card.comparisons, card.timings),
            runs=[_reproduce(r) for r in [*(c.own for c in card.comparisons), *card.timings, *card.transfers]],
            results_folder=RESULTS,
            citations=cite({"layers": spec["layers"]}),
        )
    )


def auto_class(architecture: str | None) -> str:
    """The class to load it with: an Auto class where the name tells which.

    >>> auto_class("BertForSequenceClassification"), auto_class("GPT2LMHeadModel"), auto_class("BertModel")
    ('AutoModelForSequenceClassification', 'AutoModelForCausalLM', 'AutoModel')
    """
    import transformers

    if architecture is None or (architecture.endswith("Model") and not architecture.endswith("LMHeadModel")):
        return "AutoModel"
    name = "AutoModelForCausalLM" if architecture.endswith("LMHeadModel") else f"AutoModelFor{_head(architecture)}"
    return name if hasattr(transformers, name) else architecture


def _head(architecture: str) -> str:
    return architecture.rpartition("For")[2]


def _summary(card: Card) -> str:
    if card.base_model is None:
        base = "A model"
    elif HUB_NAME.fullmatch(card.base_model):
        base = f"[{card.base_model}](https://huggingface.co/{card.base_model})"
    else:
        base = f"`{card.base_model}`"
    tasks = " and ".join(dict.fromkeys(comparison.own.task for comparison in card.comparisons))
    tuned = f", fine-tuned on {tasks}" if tasks else ""
    licence = "" if card.license else " The licence of the base model is not recorded here; look it up before use."
    return (
        f"{base} whose softmax attention was replaced by linear-time attention ({', '.join(card.mechanisms)}) with "
        f"`hf_rfattn`{tuned}.{licence}"
    )


def _layer_rows(folder: CheckpointFolder) -> list[dict[str, str]]:
    rows = []
    for part, spec in folder.specs.items():
        for layers, config in spec["layers"].items():
            full = full_config(config)
            options = {k: v for k, v in full.items() if k != "mechanism"} if isinstance(full, dict) else {}
            written = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in options.items())
            rows.append(
                {
                    "layers": f"{part} {layers}".strip(),
                    "attention": f"softmax → {full['mechanism'] if isinstance(full, dict) else full}",
                    "options": _cell(written) or "none",
                }
            )
    return rows


def _task_table(comparison: Comparison) -> dict[str, Any]:
    own = comparison.own
    metrics = list(own.metrics)
    dataset = " ".join(f"`{own.dataset[key]}`" for key in ("name", "config", "split") if own.dataset.get(key))
    budget = ", ".join(f"{name} {json.dumps(value)}" for name, value in own.budget.items())
    examples = ", ".join(f"{name} on {metric.n:,}" for name, metric in own.metrics.items())
    rows = []
    for row in comparison.rows:
        result = row.result
        measured = [number(result.metrics[m].value) if m in result.metrics else "–" for m in metrics]
        speed = [_or_dash(value) for value in (result.samples_per_second, result.tokens_per_second)]
        memory = "–" if result.peak_memory_bytes is None else in_bytes(result.peak_memory_bytes)
        taught = result.document.get("transfer")
        role = f"{row.role}, after {taught['steps']} steps of attention transfer" if taught else row.role
        rows.append([_cell(attention_label(result.attention)), role, str(result.seed), *measured, *speed, memory])
    extra = any(row.result.document.get("transfer") for row in comparison.rows)
    more = " (attention transfer, without labels, came on top where a row had it)" if extra else ""
    about = f"Data: {dataset}; examples: {examples}. Budget, the same for every row{more}: {budget}. On {own.machine}."
    return {"title": own.task, "about": about, "metrics": metrics, "rows": rows}


def _speed_table(speed: SpeedResult) -> dict[str, Any]:
    rows = [
        [
            f"{t.length:,}",
            number(t.softmax_seconds * 1000),
            number(t.patched_seconds * 1000),
            f"{number(t.speed, 3)} ×",
            *("–" if peak is None else in_bytes(peak) for peak in (t.softmax_peak_bytes, t.patched_peak_bytes)),
        ]
        for t in speed.lengths
    ]
    start = crossover(speed)
    return {
        "about": f"One pass of the whole model, batch {speed.batch}, {speed.dtype}, on {speed.machine}.",
        "rows": rows,
        "crossover": "Not faster than softmax at the longest length measured."
        if start is None
        else f"Crossover: faster than softmax from {start:,} tokens on, among the lengths measured.",
    }


def _transfer_table(transfer: TransferResult) -> dict[str, Any]:
    dataset = " ".join(f"`{transfer.dataset[key]}`" for key in ("name", "config", "split") if transfer.dataset.get(key))
    settings = ", ".join(
        f"{name} {json.dumps(value)}"
        for name, value in transfer.transfer.items()
        if not isinstance(value, (dict, list))
    )
    before, after = transfer.errors.before, transfer.errors.after
    columns = zip(after.layers, after.average, before.overall, after.overall, strict=True)
    return {
        "about": f"Text: {dataset}, without labels; {settings}. On {transfer.machine}.",
        "rows": [[f"`{_cell(layer)}`", *(number(error) for error in errors)] for layer, *errors in columns],
    }


def _reproduce(result: Result) -> str:
    document = result.document
    git, versions = document["git"], document["versions"]
    commit = f"commit `{git['commit']}`" if git.get("commit") else "a commit that was not recorded"
    changed = " with uncommitted changes" if git.get("changed") else ""
    command = document.get("command")
    line = f": `{shlex.join(map(str, command)) if isinstance(command, list) else command}`" if command else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"`{RESULTS}/{result.file}`{line}, {commit}{changed} of hf_rfattn, seed {result.seed} ({packages})"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else number(value)


def _cell(text: str) -> str:
    """Text that does not break a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
