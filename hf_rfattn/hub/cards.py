"""Model cards, generated from the config of a checkpoint and its result documents only."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..install import install_command
from ..integration.reading import named_model_class
from ..mechanisms.naming import full_config, mechanism_names_in, mechanisms_in
from ..results import (
    CONTROLS,
    DASH,
    RESULTS,
    Block,
    Result,
    Table,
    as_markdown,
    in_bytes,
    number,
    read_result,
    read_results,
    results_fingerprint,
    without_folders,
    write_result,
    write_whole,
)
from .folder import CARD, CheckpointFolder
from .scores import ScoreTable, details, label_of, make_tables

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
LOADING = """Install hf-rfattn: {install}. Then:

```python
import hf_rfattn  # before loading
{code}
```"""
POOLINGS = {"cls": "hidden state of the first token", "mean": "mean of all hidden states"}
THIS = "**this model**: "


@dataclass(frozen=True)
class Card:
    """The contents of a card."""

    folder: CheckpointFolder
    own: list[Result]  # task results of this checkpoint
    tables: list[ScoreTable]  # these, with other results of the same budget
    timings: list[Result]
    transfers: list[Result]
    base_model: str | None
    license: str | None
    address: str  # argument of from_pretrained


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
    """Generate the card of a folder without writing it."""
    checkpoint = CheckpointFolder(Path(folder))
    results = read_results(checkpoint.path / RESULTS)
    found = [result for result in results if result.checkpoint == checkpoint.fingerprint]
    own, timings, transfers = ([r for r in found if r.kind == kind] for kind in ("task", "speed", "transfer"))
    tasks = {result.measured_on for result in own}
    beside = [result for result in results if result.kind == "task" and result.measured_on in tasks]
    card = Card(
        folder=checkpoint,
        own=own,
        tables=make_tables(beside, lambda r: r.task, lambda r: (THIS if r in own else "") + label_of(r)),
        timings=timings,
        transfers=transfers,
        base_model=base_model or next((result.model for result in found), None),
        license=license or next((r.base_license for r in [*own, *transfers] if r.base_license), None),
        address=repo_id or checkpoint.path.resolve().name,
    )
    return ModelCard(f"---\n{_metadata(card).to_yaml()}\n---\n\n{as_markdown(_text(card))}")


def _metadata(card: Card) -> ModelCardData:
    """The YAML metadata, which the Hub reads."""
    base = card.base_model if HUB_NAME.fullmatch(card.base_model or "") else None
    datasets = [own.dataset["name"] for own in card.own if HUB_NAME.fullmatch(own.dataset["name"])]
    evaluations = [
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
        for own in card.own
        for name, metric in own.metrics.items()
    ]
    data = ModelCardData(
        model_name=card.address.rpartition("/")[2] if card.own else None,
        eval_results=evaluations or None,
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        license=card.license,
        pipeline_tag=next((tag for end, tag in PIPELINES.items() if card.folder.architecture.endswith(end)), None),
        tags=["hf_rfattn", "efficient-attention", *mechanism_names_in(card.folder.attention)],
        datasets=list(dict.fromkeys(datasets)) or None,
        metrics=list(dict.fromkeys(name for own in card.own for name in own.metrics)) or None,
    )
    data[FINGERPRINT] = card.folder.fingerprint
    data[RESULTS_FINGERPRINT] = results_fingerprint(card.folder.path)
    return data


def _text(card: Card) -> Iterator[Block]:
    """The text below the metadata. All numbers come from result documents."""
    spec, name, used = card.folder.spec, card.base_model, [*card.own, *card.timings, *card.transfers]
    base = f"[{name}](https://huggingface.co/{name})" if HUB_NAME.fullmatch(name or "") else f"`{name or 'A model'}`"
    tasks = " and ".join(dict.fromkeys(own.task for own in card.own))
    done = "fine-tuned" if any("steps" in own.budget for own in card.own) else "evaluated"
    mechanisms = " and ".join(mechanism_names_in(card.folder.attention))
    yield f"# {card.address.rpartition('/')[2]}"
    yield (
        f"{base} with its softmax attention replaced by {mechanisms} attention, using `hf_rfattn`"
        f"{f', {done} on {tasks}' if tasks else ''}."
        + ("" if card.license else " The license of the base model is not recorded; check it before use.")
    )
    yield "## Attention"
    yield Table("", ["layers", "attention", "options"], list(_layer_rows(card.folder)))
    yield (
        f"Cross-attention: {'replaced' if spec.get('cross_attention') else 'softmax, if any'}. Random seed: "
        f"{spec.get('seed')}. Random features are saved with the weights and are not redrawn on loading."
    )
    yield "## How to load it"
    yield LOADING.format(install=install_command(), code="\n".join(_loading(card)))
    if _needs_recipes(card):
        pooling, name = card.folder.config["classifier_pooling"], card.folder.architecture
        yield (
            f"**Note:** this classifier reads the {POOLINGS[pooling]} (`classifier_pooling: {pooling}`), which "
            f"`{name}` does not support. The code above gives it a randomly initialized pooler; load it with the "
            f"classification recipes of hf_rfattn instead (`--model {card.address}`)."
        )
    yield "## Results"
    for transfer in card.transfers:
        yield from _transfer_table(transfer)
    for table in card.tables:
        yield f"### {table.title}"
        yield (
            f"All rows have the same budget: {table.budget}. (chance) marks scores that are not clearly better than "
            "the best constant answer. The controls are `average` (no attention) and `band` (a window alone)."
        )
        yield details(table)
        controls = [row.control for row in table.rows]
        if missing := [control for control in CONTROLS if control not in controls]:
            yield f"Not measured: {'; '.join(missing)}."
    for speed in card.timings:
        yield from _speed_table(speed)
    for what, found in (("accuracy", card.tables), ("speed by length", card.timings)):
        if not found:
            yield f"No {what} was measured for this checkpoint."
    yield "## How to reproduce"
    yield "\n".join(f"- {_origin(result)}" for result in used) or "No run is recorded."
    yield f"`hf-rfattn card` generated this card from the documents in `{RESULTS}/` and `config.json`."
    if entries := cite(card.folder.attention):
        yield "## Citations"
        yield "```bibtex\n" + "\n\n".join(entries) + "\n```"


def _layer_rows(folder: CheckpointFolder) -> Iterator[list[str]]:
    for part, spec in folder.specs.items():
        for layers, config in spec["layers"].items():
            full = full_config(config)
            full = full if isinstance(full, dict) else {"mechanism": full}
            options = ", ".join(f"`{k}={json.dumps(v)}`" for k, v in full.items() if k != "mechanism")
            yield [f"{part} {layers}".strip(), f"softmax → {full['mechanism']}", options or "none"]


def _loading(card: Card) -> Iterator[str]:
    """Lines of Python that load the model."""
    path, name = card.folder.path, card.folder.architecture
    if (path / "modules.json").exists():
        yield "from sentence_transformers import SentenceTransformer"
        yield f'\nmodel = SentenceTransformer("{card.address}")'
        return
    tokenizer = (path / "tokenizer_config.json").exists()
    yield f"from transformers import {'AutoTokenizer, ' if tokenizer else ''}{name}"
    yield f'\nmodel = {name}.from_pretrained("{card.address}")'
    if tokenizer:
        yield f'tokenizer = AutoTokenizer.from_pretrained("{card.address}")'


def _needs_recipes(card: Card) -> bool:
    """Whether the model was fine-tuned with a pooling that its own code in transformers does not implement."""
    if card.folder.config.get("classifier_pooling") not in POOLINGS:
        return False
    model = named_model_class(card.folder.architecture)
    return model is not None and not hasattr(model.config_class(), "classifier_pooling")


def _transfer_table(result: Result) -> Iterator[Block]:
    settings = ", ".join(f"{k} {json.dumps(v)}" for k, v in result.transfer.items() if not isinstance(v, (dict, list)))
    before, after = result.errors["before"], result.errors["after"]
    columns = zip(after["layers"], after["average"], before["overall"], after["overall"], strict=True)
    data = " ".join(f"`{result.dataset[key]}`" for key in ("name", "config", "split") if result.dataset.get(key))
    yield "### Attention transfer"
    yield (
        f"Relative error of attention outputs against softmax, by layer. Unlabelled text: {data}; {settings}. Measured "
        f"on {result.machine}. A small error does not guarantee accuracy on a task: fine-tune and evaluate."
    )
    rows = [[f"`{layer}`", *map(number, errors)] for layer, *errors in columns]
    yield Table("", ["layer", "plain averaging", "before", "after"], rows)


def _speed_table(speed: Result) -> Iterator[Block]:
    rows = []
    for timing in sorted(speed.lengths, key=lambda timing: timing["length"]):
        softmax, patched = timing["softmax_seconds"], timing["patched_seconds"]
        peaks = [timing.get(f"{who}_peak_bytes") for who in ("softmax", "patched")]
        cells = [number(1000 * softmax), number(1000 * patched), f"{number(softmax / patched, 3)} ×"]
        rows.append([f"{timing['length']:,}", *cells, *(in_bytes(peak) if peak else DASH for peak in peaks)])
    yield "### Speed and memory by sequence length"
    yield f"One pass of the whole model, batch {speed.batch}, {speed.dtype}, on {speed.machine}."
    headings = ["tokens", "softmax, ms", "this model, ms", "speed over softmax", "softmax, peak", "this model, peak"]
    yield Table("", headings, rows)


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
