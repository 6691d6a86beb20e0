"""Model cards, generated from the config of a checkpoint and its result documents only."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..install import install_command
from ..integration.reading import named_model_class
from ..mechanisms.naming import full_config, mechanism_names_in, mechanisms_in
from ..results.documents import (
    CONFIG,
    RESULTS,
    WEIGHTS,
    checkpoint_fingerprint,
    read_result,
    results_fingerprint,
    weight_files,
    without_folders,
    write_result,
    write_whole,
)
from ..results.report import DASH, Table, as_markdown, in_bytes, number
from ..results.schema import CONTROLS, Result, read_results
from .scores import details, label_of, make_tables

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # name of a model or dataset on the Hub
FINGERPRINT, RESULTS_FINGERPRINT = "rfattn_checkpoint_sha256", "rfattn_results_sha256"
PIPELINES = {  # by the end of the model class's name
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
POOLINGS = {"cls": "hidden state of the first token", "mean": "mean of all hidden states"}
CARD = "README.md"


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with a patched checkpoint. Raises ValueError if it has none."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise ValueError(f"There is no folder {str(self.path)!r}.")
        if not (self.path / CONFIG).is_file():
            raise ValueError(
                f"{self.path} is not a checkpoint: it has no {CONFIG}. Give a folder that save_pretrained, "
                "`hf-rfattn patch` or `hf-rfattn convert` has written."
            )
        if not self.specs:
            raise ValueError(
                f"{self.path} is not a patched checkpoint: its config.json has no key 'rfattn'. "
                "Call hf_rfattn.patch_model and model.save_pretrained first."
            )
        if not weight_files(self.path):
            raise ValueError(f"{self.path} has no weights: neither {WEIGHTS} nor shards of it.")

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_result(self.path / CONFIG)

    @cached_property
    def specs(self) -> dict[str, dict[str, Any]]:
        """Records of `patch_model`, by part of the model; "" is the model itself."""
        parts = [("", self.config), *self.config.items()]
        found = {name: part["rfattn"] for name, part in parts if isinstance(part, dict) and part.get("rfattn")}
        if not all(isinstance(spec, dict) and spec.get("layers") for spec in found.values()):
            raise ValueError(f"{self.path / CONFIG}: rfattn has no layers.")
        return found

    @property
    def spec(self) -> dict[str, Any]:
        return next(iter(self.specs.values()))

    @property
    def attention(self) -> dict[str, Any]:
        """The attention, in the format of result documents."""
        return {"layers": self.spec["layers"]}

    @property
    def architecture(self) -> str:
        """The transformers class to load it with."""
        return next(iter(self.config.get("architectures") or ()), "AutoModel")

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.path)


def write_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> Path:
    """Write the model card of a checkpoint to README.md in its folder, and return the path.

    The card is generated from the result documents in the subfolder results/, in which paths are replaced with names.
    Results whose `checkpoint` is the fingerprint of this folder are shown as this model's, others for comparison.
    `repo_id`: repository on the Hub where it will be published. `base_model` and `license`: needed if no result has
    them.
    """
    for path in (Path(folder) / RESULTS).glob("*.json"):
        write_result(without_folders(read_result(path)), path)
    write_whole(str(make_card(folder, repo_id=repo_id, base_model=base_model, license=license)), Path(folder) / CARD)
    return Path(folder) / CARD


def make_card(
    folder: str | Path, *, repo_id: str | None = None, base_model: str | None = None, license: str | None = None
) -> ModelCard:
    """Generate the card of a folder without writing it. All numbers in it come from result documents."""
    checkpoint = CheckpointFolder(Path(folder))
    results = read_results(checkpoint.path / RESULTS)
    found = [result for result in results if result.checkpoint == checkpoint.fingerprint]
    own, timings, transfers = ([r for r in found if r.kind == kind] for kind in ("task", "speed", "transfer"))
    compared = {result.measured_on for result in own}
    beside = [result for result in results if result.kind == "task" and result.measured_on in compared]
    model = base_model or next((result.model for result in found), None)
    license = license or next((r.base_license for r in [*own, *transfers] if r.base_license), None)
    on_hub = bool(HUB_NAME.fullmatch(model or ""))
    address = repo_id or checkpoint.path.resolve().name
    name = address.rpartition("/")[2]
    return ModelCard.from_template(
        _metadata(checkpoint, own, name, model if on_hub else None, license),
        template_path=str(files(__package__) / "card.md"),
        folder=checkpoint,
        own=own,
        tables=make_tables(beside, lambda r: r.task, lambda r: ("**this model**: " if r in own else "") + label_of(r)),
        timings=timings,
        transfers=transfers,
        license=license,
        name=name,
        address=address,  # argument of from_pretrained
        base=f"[{model}](https://huggingface.co/{model})" if on_hub else f"`{model or 'A model'}`",
        mechanisms=" and ".join(mechanism_names_in(checkpoint.attention)),
        tasks=" and ".join(dict.fromkeys(result.task for result in own)),
        trained=any("steps" in result.budget for result in own),
        install=install_command(),
        pools=(checkpoint.path / "modules.json").exists(),
        tokenizer=(checkpoint.path / "tokenizer_config.json").exists(),
        pooling=_pooling_of_recipes(checkpoint),
        layer_rows=_layer_rows(checkpoint),
        transfer_rows=_transfer_rows,
        speed_rows=_speed_rows,
        settings=lambda r: ", ".join(
            f"{key} {json.dumps(value)}" for key, value in r.transfer.items() if not isinstance(value, (dict, list))
        ),
        data=lambda r: " ".join(f"`{r.dataset[key]}`" for key in ("name", "config", "split") if r.dataset.get(key)),
        missing_controls=lambda t: [control for control in CONTROLS if control not in [row.control for row in t.rows]],
        origin=_origin,
        details=lambda scores: as_markdown([details(scores)]).rstrip(),
        table=lambda headings, rows: as_markdown([Table("", headings, list(rows))]).rstrip(),
        citations=cite(checkpoint.attention),
    )


def _metadata(
    folder: CheckpointFolder, own: list[Result], name: str, base: str | None, license: str | None
) -> ModelCardData:
    """The YAML metadata, which the Hub reads."""
    datasets = [result.dataset["name"] for result in own if HUB_NAME.fullmatch(result.dataset["name"])]
    evaluations = [
        EvalResult(
            task_type=result.task_type,
            task_name=result.task,
            dataset_type=result.dataset["name"],
            dataset_name=" ".join(filter(None, [result.dataset["name"], result.dataset.get("config")])),
            dataset_config=result.dataset.get("config"),
            dataset_split=result.dataset["split"],
            metric_type=metric,
            metric_name=metric,
            metric_value=measured.value,
        )
        for result in own
        for metric, measured in result.metrics.items()
    ]
    data = ModelCardData(
        model_name=name if own else None,
        eval_results=evaluations or None,
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        license=license,
        pipeline_tag=next((tag for end, tag in PIPELINES.items() if folder.architecture.endswith(end)), None),
        tags=["hf_rfattn", "efficient-attention", *mechanism_names_in(folder.attention)],
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=list(dict.fromkeys(metric for result in own for metric in result.metrics)) or None,
    )
    data[FINGERPRINT] = folder.fingerprint
    data[RESULTS_FINGERPRINT] = results_fingerprint(folder.path)
    return data


def _layer_rows(folder: CheckpointFolder) -> Iterator[list[str]]:
    for part, spec in folder.specs.items():
        for layers, config in spec["layers"].items():
            full = full_config(config)
            full = full if isinstance(full, dict) else {"mechanism": full}
            options = ", ".join(f"`{k}={json.dumps(v)}`" for k, v in full.items() if k != "mechanism")
            yield [f"{part} {layers}".strip(), f"softmax → {full['mechanism']}", options or "none"]


def _pooling_of_recipes(folder: CheckpointFolder) -> str | None:
    """Describe the pooling that a recipe trained the classifier with, if its transformers class has none."""
    model = named_model_class(folder.architecture)
    if model is None or hasattr(model.config_class(), "classifier_pooling"):
        return None
    return POOLINGS.get(folder.config.get("classifier_pooling", ""))


def _transfer_rows(result: Result) -> list[list[str]]:
    before, after = result.errors["before"], result.errors["after"]
    columns = zip(after["layers"], after["average"], before["overall"], after["overall"], strict=True)
    return [[f"`{layer}`", *map(number, errors)] for layer, *errors in columns]


def _speed_rows(speed: Result) -> Iterator[list[str]]:
    for timing in sorted(speed.lengths, key=lambda timing: timing["length"]):
        softmax, patched = timing["softmax_seconds"], timing["patched_seconds"]
        peaks = [timing.get(f"{who}_peak_bytes") for who in ("softmax", "patched")]
        cells = [number(1000 * softmax), number(1000 * patched), f"{number(softmax / patched, 3)} ×"]
        yield [f"{timing['length']:,}", *cells, *(in_bytes(peak) if peak else DASH for peak in peaks)]


def _origin(result: Result) -> str:
    git, command = result.git, result.document.get("command")
    commit = f"commit `{git['commit']}`" if git.get("commit") else "unknown commit"
    changed = " with uncommitted changes" if git.get("changed") else ""
    line = f": `{shlex.join(map(str, command)) if isinstance(command, list) else command}`" if command else ""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    return f"`{RESULTS}/{result.file}`{line}, {commit}{changed} of hf_rfattn, seed {result.seed} ({packages})"


def cite(attention: Mapping[str, Any]) -> list[str]:
    """Return the BibTeX entries for the mechanisms of an attention document, which references.bib names above each.

    >>> [entry.partition(",")[0] for entry in cite({"mechanism": "fmm", "far": ["favor+"]})]
    ['@inproceedings{choromanski2021performers', '@inproceedings{nguyen2021fmmformer']
    """
    names = set(mechanism_names_in(attention))
    if any(config.get("variance") == "optimal" for config in mechanisms_in(attention)):
        names.add("favor++")
    text = files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    entries = (entry.partition("\n") for entry in re.split(r"(?m)^% ", text)[1:])
    return [entry.strip() for of, _, entry in entries if names & set(of.split())]
