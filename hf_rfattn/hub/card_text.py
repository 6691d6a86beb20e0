"""The text of a model card, as the blocks of a report. Every number comes from result documents."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..mechanisms.naming import attention_label, full_config
from ..results import (
    RESULTS,
    Block,
    Bullets,
    Heading,
    Image,
    Paragraph,
    Result,
    SpeedResult,
    Table,
    TransferResult,
    number,
)
from ..results.report import DASH
from ..results.units import in_bytes
from .card_plot import plot_results
from .citations import cite
from .findings import Comparison, crossover, limitations
from .folder import PLOT, CheckpointFolder

if TYPE_CHECKING:
    from .cards import Card

SPEED = [
    "tokens", "softmax, ms", "this model, ms", "speed over softmax", "softmax, peak memory", "this model, peak memory",
]  # fmt: skip


def card_text(card: "Card") -> Iterator[Block]:
    """All of it below the metadata."""
    spec = card.folder.spec
    yield Heading(card.title, 1)
    yield Paragraph(summary(card))
    yield Heading("What was replaced with what")
    yield Table("", ["layers", "attention", "options"], list(layer_rows(card.folder)))
    cross = "replaced as well" if spec.get("cross_attention") else "softmax, where there is any"
    yield Paragraph(
        f"Cross-attention: {cross}. Seed of the random draws: {spec.get('seed')}; the draws themselves are in the "
        "weights, and nothing is drawn again on loading."
    )
    yield Heading("How to load it")
    yield from loading(card)
    yield Heading("Results")
    yield from results(card)
    yield Heading("Limitations")
    yield Bullets(limitations(card.comparisons, card.timings))
    yield Heading("How to reproduce")
    yield Bullets([origin(r) for r in card.used]) if card.used else Paragraph("No run is recorded.")
    yield Paragraph(
        f"This card was made by `hf-rfattn card` from the documents in `{RESULTS}/` and the checkpoint's "
        "`config.json`, and from nothing else."
    )
    if entries := cite({"layers": spec["layers"]}):
        yield Heading("Citations")
        yield Paragraph("```bibtex\n" + "\n\n".join(entries) + "\n```")


def summary(card: "Card") -> str:
    base = "A model" if card.base_model is None else f"`{card.base_model}`"
    if card.base_on_hub:
        base = f"[{card.base_model}](https://huggingface.co/{card.base_model})"
    tasks = " and ".join(dict.fromkeys(comparison.own.task for comparison in card.comparisons))
    tuned = f", fine-tuned on {tasks}" if tasks else ""
    licence = "" if card.license else " The licence of the base model is not recorded here; look it up before use."
    return (
        f"{base} whose softmax attention was replaced by linear-time attention ({', '.join(card.mechanisms)}) with "
        f"`hf_rfattn`{tuned}.{licence}"
    )


def layer_rows(folder: CheckpointFolder) -> Iterator[list[str]]:
    for part, spec in folder.specs.items():
        for layers, config in spec["layers"].items():
            full = full_config(config)
            options = {k: v for k, v in full.items() if k != "mechanism"} if isinstance(full, dict) else {}
            name = full["mechanism"] if isinstance(full, dict) else full
            written = ", ".join(f"`{option}={json.dumps(value)}`" for option, value in options.items())
            yield [f"{part} {layers}".strip(), f"softmax → {name}", written or "none"]


def loading(card: "Card") -> Iterator[Block]:
    with_tokenizer = (card.folder.path / "tokenizer_config.json").exists()
    code = [
        "import hf_rfattn  # before loading: it brings the attention back",
        f"from transformers import {card.loader}{', AutoTokenizer' if with_tokenizer else ''}",
        "",
        f'model = {card.loader}.from_pretrained("{card.address}")',
    ]
    if with_tokenizer:
        code.append(f'tokenizer = AutoTokenizer.from_pretrained("{card.address}")')
    yield Paragraph("```\npip install hf-rfattn\n```")
    yield Paragraph("\n".join(["```python", *code, "```"]))
    yield Paragraph(
        "Without `import hf_rfattn` transformers refuses to load it, rather than run it with an attention it was not "
        "trained with."
    )


def results(card: "Card") -> Iterator[Block]:
    if not card.used:
        yield Paragraph(
            "Nothing was measured with this checkpoint, so this card claims nothing about its quality or its speed."
        )
    if card.has_plot:
        what = "Accuracy beside softmax and the controls; time and memory by length"
        yield Image(PLOT, what, lambda: plot_results(card.comparisons, card.timings))
    for transfer in card.transfers:
        yield from transfer_table(transfer)
    for comparison in card.comparisons:
        yield from task_table(comparison)
    for speed in card.timings:
        yield from speed_table(speed)


def transfer_table(result: TransferResult) -> Iterator[Block]:
    settings = [f"{k} {json.dumps(v)}" for k, v in result.transfer.items() if not isinstance(v, (dict, list))]
    before, after = result.errors.before, result.errors.after
    columns = zip(after.layers, after.average, before.overall, after.overall, strict=True)
    yield Heading("Attention transfer", 3)
    yield Paragraph(
        "The mechanisms were taught to imitate the softmax they replace, layer by layer. Text: "
        f"{dataset(result.dataset)}, without labels; {', '.join(settings)}. On {result.machine}."
    )
    rows = [[f"`{layer}`", *map(number, errors)] for layer, *errors in columns]
    yield Table("", ["layer", "plain averaging", "before", "after"], rows)
    yield Paragraph(
        "Errors of attention outputs relative to softmax. A small error is not accuracy on a task: fine-tune and "
        "evaluate."
    )


def task_table(comparison: Comparison) -> Iterator[Block]:
    own = comparison.own
    rows, more = [], ""
    for row in comparison.rows:
        result, role = row.result, row.role
        if taught := result.document.get("transfer"):
            role += f", after {taught['steps']} steps of attention transfer"
            more = " (attention transfer, without labels, came on top where a row had it)"
        values = [result.metrics[name].value if name in result.metrics else None for name in own.metrics]
        values += [result.samples_per_second, result.tokens_per_second]
        cells = [DASH if value is None else number(value) for value in values]
        memory = DASH if result.peak_memory_bytes is None else in_bytes(result.peak_memory_bytes)
        rows.append([attention_label(result.attention), role, str(result.seed), *cells, memory])
    budget = ", ".join(f"{name} {json.dumps(value)}" for name, value in own.budget.items())
    examples = ", ".join(f"{name} on {metric.n:,}" for name, metric in own.metrics.items())
    yield Heading(own.task, 3)
    yield Paragraph(
        f"Data: {dataset(own.dataset)}; examples: {examples}. Budget, the same for every row{more}: {budget}. "
        f"On {own.machine}."
    )
    headings = ["attention", "what it is", "seed", *own.metrics, "samples/s", "tokens/s", "peak memory"]
    yield Table("", headings, rows)


def speed_table(speed: SpeedResult) -> Iterator[Block]:
    rows = []
    for t in speed.lengths:
        peaks = [DASH if peak is None else in_bytes(peak) for peak in (t.softmax_peak_bytes, t.patched_peak_bytes)]
        milliseconds = [number(seconds * 1000) for seconds in (t.softmax_seconds, t.patched_seconds)]
        rows.append([f"{t.length:,}", *milliseconds, f"{number(t.speed, 3)} ×", *peaks])
    start = crossover(speed)
    yield Heading("Speed and memory by length", 3)
    yield Paragraph(f"One pass of the whole model, batch {speed.batch}, {speed.dtype}, on {speed.machine}.")
    yield Table("", SPEED, rows)
    yield Paragraph(
        "Not faster than softmax at the longest length measured."
        if start is None
        else f"Break-even: faster than softmax from {start:,} tokens on, among the lengths measured."
    )


def dataset(document: Mapping[str, Any]) -> str:
    return " ".join(f"`{document[key]}`" for key in ("name", "config", "split") if document.get(key))


def origin(result: Result) -> str:
    git, command = result.git, result.document.get("command")
    commit = f"commit `{git['commit']}`" if git.get("commit") else "a commit that was not recorded"
    changed = " with uncommitted changes" if git.get("changed") else ""
    line = f": `{shlex.join(map(str, command)) if isinstance(command, list) else command}`" if command else ""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items() if version)
    return f"`{RESULTS}/{result.file}`{line}, {commit}{changed} of hf_rfattn, seed {result.seed} ({packages})"
