"""The text and the citations of a model card. Every number comes from result documents."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..mechanisms.naming import attention_label, full_config, mechanism_names_in, mechanisms_in
from ..results import DASH, RESULTS, Block, Bullets, Heading, Paragraph, Result, Table, in_bytes, number

if TYPE_CHECKING:
    from .cards import Card, Comparison

PAPERS = {
    "favor+": ["choromanski2021performers"],
    "rff": ["rahimi2007random", "peng2021random"],
    "linear": ["katharopoulos2020transformers"],
    "hedgehog": ["zhang2024hedgehog"],
    "fmm": ["nguyen2021fmmformer"],
    "band": ["nguyen2021fmmformer"],  # its near field
    "multipole": ["greengard1987fast"],
}
FAVOR_PLUS_PLUS = "likhosherstov2022chefs"
LOADING = """`pip install hf-rfattn`, then:

```python
import hf_rfattn  # before loading
{code}
```"""


def card_text(card: "Card") -> Iterator[Block]:
    """All of it below the metadata."""
    spec, name = card.folder.spec, card.base_model
    base = f"[{name}](https://huggingface.co/{name})" if card.base_on_hub else f"`{name}`" if name else "A model"
    tasks = " and ".join(dict.fromkeys(own.task for own in card.own))
    done = "fine-tuned" if any("steps" in own.budget for own in card.own) else "evaluated"
    yield Heading(card.address.rpartition("/")[2], 1)
    yield Paragraph(
        f"{base} with its softmax attention replaced by {' and '.join(card.mechanisms)} attention, using `hf_rfattn`"
        f"{f', {done} on {tasks}' if tasks else ''}."
        + ("" if card.license else " The licence of the base model is not recorded here; look it up before use.")
    )
    yield Heading("Attention")
    yield Table("", ["layers", "attention", "options"], list(_layer_rows(card)))
    yield Paragraph(
        f"Cross-attention: {'replaced' if spec.get('cross_attention') else 'softmax, if any'}. Random seed: "
        f"{spec.get('seed')}; random features are stored with the weights and are not drawn again on loading."
    )
    yield Heading("How to load it")
    yield Paragraph(LOADING.format(code="\n".join(_loading(card))))
    yield Heading("Results")
    if not card.used:
        yield Paragraph("Nothing was measured with this checkpoint.")
    for transfer in card.transfers:
        yield from _transfer_table(transfer)
    for comparison in card.comparisons:
        yield from _task_table(comparison)
    for speed in card.timings:
        yield from _speed_table(speed)
    yield Heading("Limitations")
    yield Bullets(list(card.limitations()))
    yield Heading("How to reproduce")
    yield Bullets([_origin(r) for r in card.used]) if card.used else Paragraph("No run is recorded.")
    yield Paragraph(f"`hf-rfattn card` made this card from the documents in `{RESULTS}/` and `config.json`.")
    if entries := cite({"layers": spec["layers"]}):
        yield Heading("Citations")
        yield Paragraph("```bibtex\n" + "\n\n".join(entries) + "\n```")


def _layer_rows(card: "Card") -> Iterator[list[str]]:
    for part, spec in card.folder.specs.items():
        for layers, config in spec["layers"].items():
            full = full_config(config)
            full = full if isinstance(full, dict) else {"mechanism": full}
            options = ", ".join(f"`{k}={json.dumps(v)}`" for k, v in full.items() if k != "mechanism")
            yield [f"{part} {layers}".strip(), f"softmax → {full['mechanism']}", options or "none"]


def _loading(card: "Card") -> Iterator[str]:
    """Lines of Python."""
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


def _transfer_table(result: Result) -> Iterator[Block]:
    settings = ", ".join(f"{k} {json.dumps(v)}" for k, v in result.transfer.items() if not isinstance(v, (dict, list)))
    before, after = result.errors["before"], result.errors["after"]
    columns = zip(after["layers"], after["average"], before["overall"], after["overall"], strict=True)
    yield Heading("Attention transfer", 3)
    yield Paragraph(
        f"Error of attention outputs relative to softmax, by layer. Text, without labels: {_dataset(result.dataset)}; "
        f"{settings}. On {result.machine}. A small error does not guarantee accuracy on a task: fine-tune and evaluate."
    )
    rows = [[f"`{layer}`", *map(number, errors)] for layer, *errors in columns]
    yield Table("", ["layer", "plain averaging", "before", "after"], rows)


def _task_table(comparison: "Comparison") -> Iterator[Block]:
    own, rows = comparison[0][1], []
    for role, result in comparison:
        if taught := result.document.get("transfer"):
            role += f", after {taught['steps']} steps of attention transfer"
        values = [result.metrics[name].value if name in result.metrics else None for name in own.metrics]
        values += [result.samples_per_second, result.tokens_per_second]
        cells = [DASH if value is None else number(value) for value in values]
        memory = in_bytes(result.peak_memory_bytes) if result.peak_memory_bytes else DASH
        rows.append([attention_label(result.attention), role, str(result.seed), *cells, memory])
    budget = ", ".join(f"{name} {json.dumps(value)}" for name, value in own.budget.items())
    examples = ", ".join(f"{name} on {metric.n:,}" for name, metric in own.metrics.items())
    yield Heading(own.task, 3)
    yield Paragraph(
        f"Data: {_dataset(own.dataset)}; examples: {examples}. All rows have the same training budget: {budget}. "
        f"On {own.machine}."
    )
    headings = ["attention", "what it is", "seed", *own.metrics, "samples/s", "tokens/s", "peak memory"]
    yield Table("", headings, rows)


def _speed_table(speed: Result) -> Iterator[Block]:
    rows = []
    for timing in sorted(speed.lengths, key=lambda timing: timing["length"]):
        softmax, patched = timing["softmax_seconds"], timing["patched_seconds"]
        peaks = [timing.get(f"{who}_peak_bytes") for who in ("softmax", "patched")]
        cells = [number(1000 * softmax), number(1000 * patched), f"{number(softmax / patched, 3)} ×"]
        rows.append([f"{timing['length']:,}", *cells, *(in_bytes(peak) if peak else DASH for peak in peaks)])
    yield Heading("Speed and memory by length", 3)
    yield Paragraph(f"One pass of the whole model, batch {speed.batch}, {speed.dtype}, on {speed.machine}.")
    headings = ["tokens", "softmax, ms", "this model, ms", "speed over softmax", "softmax, peak", "this model, peak"]
    yield Table("", headings, rows)


def _dataset(document: Mapping[str, Any]) -> str:
    return " ".join(f"`{document[key]}`" for key in ("name", "config", "split") if document.get(key))


def _origin(result: Result) -> str:
    git, command = result.git, result.document.get("command")
    commit = f"commit `{git['commit']}`" if git.get("commit") else "a commit that was not recorded"
    changed = " with uncommitted changes" if git.get("changed") else ""
    line = f": `{shlex.join(map(str, command)) if isinstance(command, list) else command}`" if command else ""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    return f"`{RESULTS}/{result.file}`{line}, {commit}{changed} of hf_rfattn, seed {result.seed} ({packages})"


def bibliography() -> dict[str, str]:
    """Every entry of references.bib by its key."""
    text = files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    entries = (entry.strip() for entry in re.split(r"(?m)^(?=@)", text))
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in entries if entry}


def cite(attention: Any) -> list[str]:
    """BibTeX of the papers behind the mechanisms of an attention document, FAVOR++ if its options ask for it.

    >>> [entry.partition(",")[0] for entry in cite({"mechanism": "fmm", "far": ["favor+"]})]
    ['@inproceedings{nguyen2021fmmformer', '@inproceedings{choromanski2021performers']
    """
    keys = [key for name in mechanism_names_in(attention) for key in PAPERS.get(name, [])]
    if any(config.get("variance") == "optimal" for config in mechanisms_in(attention)):
        keys.append(FAVOR_PLUS_PLUS)
    entries = bibliography()
    return [entries[key] for key in dict.fromkeys(keys)]
