"""The text, the plot and the citations of a model card. Every number comes from result documents."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..mechanisms.naming import attention_label, full_config, mechanism_names_in, mechanisms_in
from ..results import (
    DASH,
    RESULTS,
    SOFTMAX,
    Block,
    Bullets,
    Heading,
    Image,
    Paragraph,
    Result,
    SpeedResult,
    Table,
    TransferResult,
    in_bytes,
    number,
)
from .folder import PLOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    yield Paragraph(_loading(card))
    yield Heading("Results")
    if not card.used:
        yield Paragraph("Nothing was measured with this checkpoint.")
    if card.comparisons or card.timings:
        what = "Accuracy beside softmax and the controls; time and memory by length"
        yield Image(PLOT, what, lambda: plot_results(card.comparisons, card.timings))
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


def _loading(card: "Card") -> str:
    if (card.folder.path / "modules.json").exists():
        lines = ["from sentence_transformers import SentenceTransformer", "", f'SentenceTransformer("{card.address}")']
        return "\n".join(["`pip install hf-rfattn`, then:", "", "```python", "import hf_rfattn", *lines, "```"])
    classes = [card.loader]
    code = [f'model = {card.loader}.from_pretrained("{card.address}")']
    if (card.folder.path / "tokenizer_config.json").exists():
        classes.append("AutoTokenizer")
        code.append(f'tokenizer = AutoTokenizer.from_pretrained("{card.address}")')
    imports = ["import hf_rfattn  # before loading", f"from transformers import {', '.join(classes)}"]
    return "\n".join(["`pip install hf-rfattn`, then:", "", "```python", *imports, "", *code, "```"])


def _transfer_table(result: TransferResult) -> Iterator[Block]:
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
    own = comparison[0][1]
    rows = []
    for role, result in comparison:
        if taught := result.document.get("transfer"):
            role += f", after {taught['steps']} steps of attention transfer"
        values = [result.metrics[name].value if name in result.metrics else None for name in own.metrics]
        values += [result.samples_per_second, result.tokens_per_second]
        cells = [DASH if value is None else number(value) for value in values]
        memory = DASH if result.peak_memory_bytes is None else in_bytes(result.peak_memory_bytes)
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


def _speed_table(speed: SpeedResult) -> Iterator[Block]:
    rows = []
    for t in speed.lengths:
        peaks = [DASH if peak is None else in_bytes(peak) for peak in (t.softmax_peak_bytes, t.patched_peak_bytes)]
        milliseconds = [number(seconds * 1000) for seconds in (t.softmax_seconds, t.patched_seconds)]
        rows.append([f"{t.length:,}", *milliseconds, f"{number(t.speed, 3)} ×", *peaks])
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


def plot_results(comparisons: "Sequence[Comparison]", timings: Sequence[SpeedResult]) -> "Figure":
    """A panel of bars for each task's main metric, and one of lines for the times of each speed result."""
    from matplotlib.figure import Figure

    from ..results.plots import line_style, log_log

    panels = len(comparisons) + len(timings)
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel, comparison in zip(axes, comparisons, strict=False):
        own = comparison[0][1]
        metric = own.main_metric
        rows = [(role, result) for role, result in comparison if metric in result.metrics][::-1]
        names = [(mechanism_names_in(result.attention) or [SOFTMAX])[0] for _, result in rows]
        values = [result.metrics[metric].value for _, result in rows]
        bars = panel.barh(range(len(rows)), values, color=[line_style(name)["color"] for name in names])
        panel.bar_label(bars, [number(value) for value in values], padding=3)
        labels = [f"{attention_label(result.attention)[:40]}\n{role}" for role, result in rows]
        panel.set_yticks(range(len(rows)), labels, fontsize=7)
        panel.margins(x=0.2)
        panel.set(title=f"{own.task}: {metric} ({own.metrics[metric].n:,} examples)", xlabel=metric)
    for panel, speed in zip(axes[len(comparisons) :], timings, strict=True):
        lengths = [t.length for t in speed.lengths]
        name = mechanism_names_in(speed.attention)[0]
        panel.plot(lengths, [t.softmax_seconds for t in speed.lengths], label=SOFTMAX, **line_style(SOFTMAX))
        panel.plot(lengths, [t.patched_seconds for t in speed.lengths], label=name, **line_style(name))
        log_log(panel, lengths)
        panel.set(title=f"Seconds a pass, batch {speed.batch}, {speed.dtype}\n{speed.machine}", xlabel="tokens")
        panel.legend(frameon=False)
    return figure


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
