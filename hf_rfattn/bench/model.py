"""A whole model by length of its input: a forward pass, and a training step, softmax against mechanisms.

Inference is a forward pass without gradients. A training step is a forward pass in train mode, a backward pass from the
mean square of the model's first output (which costs what a loss on the same output costs, but for the loss itself), and
a step of AdamW. The head is the model's own: a language model computes the logits of every token. Attention dropout is
off everywhere: patched layers have none, and torch's fused kernels for softmax have none on a CPU.

All models hold the same weights; only what is patched differs. They run in turn. The memory of a step is that of one
run of its own, after all timing: the largest resident set over the one before (on CUDA, what torch allocated), so
weights and the state of AdamW are not in it, gradients and activations are.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..integration.cost import is_causal
from ..integration.discovery import find_attention
from ..integration.names import SPEC
from ..integration.reading import load_config
from ..mechanisms import Mechanism, MechanismConfig
from ..results import (
    SOFTMAX,
    Block,
    Image,
    Table,
    checkpoint_fingerprint,
    crossover_text,
    load_average,
    machine,
    name_of,
    new_result,
    parse_result,
    rounded,
    times,
)
from .devices import check_device, check_dtype
from .loading import SHAPES, describe, load_model, named_configs, random_tokens, share_weights
from .memory import bytes_around
from .settings import ModelSettings
from .timing import Competitor, Spread, crossovers, interleave, median_ratio, synchroniser, threads

WARMUP = 1  # repetitions
LEARNING_RATE = 1e-6  # so small that weights stay what they are; the cost of a step does not depend on it
AS_SAVED = "as saved"

Document = dict[str, Any]


def measure(settings: ModelSettings, progress: Callable[[float, str], Any] = lambda share, doing: None) -> Document:
    """The result document of the first model. `progress` is told the share of the work that is done and what is being
    done.
    """
    check_device(settings.device)
    check_dtype(settings.dtype, settings.device)
    attention: dict[str, Any] = dict(named_configs(settings.attention))  # unknown names fail now
    started, given = time.perf_counter(), settings.model[0]
    with threads(settings.threads), torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        result = new_result("bench model", seed=settings.seed, device=settings.device)
        progress(0, f"loading {given}")
        model = load_model(given, max(settings.lengths), dtype=settings.dtype, device=settings.device)
        if model.main_input_name != "input_ids":
            raise ValueError(f"{type(model).__name__} takes {model.main_input_name}; bench model gives it tokens.")
        model.config.get_text_config().use_cache = False
        attention = attention or _as_saved(given) or dict(named_configs(["favor+"]))
        models = share_weights(model, attention, settings.seed)
        name = f"{given}-shaped, random weights" if given in SHAPES else name_of(given)
        description = describe(model, settings.base_model or name, settings.dtype) | {"causal": _causal(model)}
        rounds = list(itertools.product(settings.passes, settings.lengths))
        work = [length * (length + 4096) * (3 if training else 1) for training, length in rounds]
        cells: list[dict[str, Any]] = []
        for number, (training, length) in enumerate(rounds):
            progress(sum(work[:number]) / sum(work), f"{given}, {name_of_pass(training)}, {length:,} tokens")
            cells += _measure_round(models, settings, training, length)
    about = {"causal": description["causal"], "dtype": settings.dtype}
    return {
        **result,
        "model": description,
        "checkpoint": checkpoint_fingerprint(given) if (Path(given) / "config.json").exists() else None,
        "attention": {
            name: config.to_dict() if isinstance(config, MechanismConfig) else {"layers": config}
            for name, config in attention.items()
        },
        "lengths": list(settings.lengths),
        "batches": [settings.batch_at(length) for length in settings.lengths],
        "training": list(settings.passes),
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "max_seconds": settings.max_seconds,
        "weights_bytes": sum(x.nbytes for x in (*model.parameters(), *model.buffers())),
        "cells": cells,
        "crossovers": crossovers([c | about for c in cells if c["attention"] != SOFTMAX], description["head_dim"]),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


def _as_saved(name: str) -> dict[str, Any]:
    """What a patched checkpoint was saved with, by layers; nothing for other models."""
    spec = None if name in SHAPES else getattr(load_config(name).get_text_config(), SPEC, None)
    return {AS_SAVED: spec["layers"]} if spec else {}


@torch.no_grad()
def _infer(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> None:
    model(**inputs)


def _train(model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], inputs: Mapping[str, torch.Tensor]) -> None:
    model(**inputs)[0].float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def _optimizers(models: dict[str, PreTrainedModel]) -> dict[str, list[torch.optim.Optimizer]]:
    """One for the weights that all models hold, and one for what a mechanism learns."""
    shared = list(models[SOFTMAX].parameters())
    known = {id(parameter) for parameter in shared}
    common = torch.optim.AdamW(shared, lr=LEARNING_RATE)
    found: dict[str, list[torch.optim.Optimizer]] = {}
    for name, model in models.items():
        own = [parameter for parameter in model.parameters() if id(parameter) not in known]
        found[name] = [common, torch.optim.AdamW(own, lr=LEARNING_RATE)] if own else [common]
    return found


def _measure_round(
    models: dict[str, PreTrainedModel], settings: ModelSettings, training: bool, length: int
) -> list[dict[str, Any]]:
    batch = settings.batch_at(length)
    inputs = random_tokens(models[SOFTMAX], batch, length, settings.seed)
    optimizers = _optimizers(models) if training else {}
    runs: dict[str, Callable[[], None]] = {}
    for name, model in models.items():
        model.train(training)
        runs[name] = partial(_train, model, optimizers[name], inputs) if training else partial(_infer, model, inputs)
    device = torch.device(settings.device)
    seconds = interleave(
        {name: Competitor(run) for name, run in runs.items()},
        settings.repetitions,
        warmup=WARMUP,
        seed=settings.seed,
        max_seconds=settings.max_seconds,
        synchronise=synchroniser(device),
    )
    cells = []
    for name, own in seconds.items():
        around = bytes_around(runs[name], device)
        spread = Spread.of([1000 * s for s in own])
        cell: dict[str, Any] = {"attention": name, "features": _features(models[name]), "length": length}
        cell |= {"batch": batch, "training": training, "milliseconds": spread.to_dict()}
        cell |= {
            "samples_per_second": rounded(1000 * batch / spread.median),
            "tokens_per_second": rounded(1000 * batch * length / spread.median),
            "speed_over_softmax": rounded(median_ratio(seconds[SOFTMAX], own)),
            "step_bytes": None if around is None else around[1] - around[0],
        }
        cells.append(cell)
    return cells


def _features(model: PreTrainedModel) -> int | None:
    """Length of φ in the first patched layer."""
    return next((module.num_features for module in model.modules() if isinstance(module, Mechanism)), None)


def _causal(model: PreTrainedModel) -> bool | None:
    """None for a model with attention of both kinds."""
    flags = {is_causal(site) for site in find_attention(model) if not site.cross}
    return flags.pop() if len(flags) == 1 else None


def speed_documents(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What model cards show of a result, by name of the mechanism: documents of kind "speed" (`results/schema.py`).

    None where the batch differs between lengths: such a document has one. Peaks are those of a forward pass: weights
    and what it takes beyond them.
    """
    batches = set(result["batches"])
    cells = {(cell["attention"], cell["length"]): cell for cell in result["cells"] if not cell["training"]}
    if len(batches) > 1 or not cells:
        return {}
    shared = ("schema_version", "created", "git", "versions", "hardware", "load_average", "seed")
    documents = {}
    for name, attention in result["attention"].items():
        rows = []
        for length in result["lengths"]:
            row: dict[str, Any] = {"length": length}
            for whose, key in ((SOFTMAX, (SOFTMAX, length)), ("patched", (name, length))):
                row[f"{whose}_seconds"] = rounded(cells[key]["milliseconds"]["median"] / 1000)
                if cells[key]["step_bytes"]:
                    row[f"{whose}_peak_bytes"] = result["weights_bytes"] + cells[key]["step_bytes"]
            rows.append(row)
        document = {key: result[key] for key in shared} | {"kind": "speed", "model": result["model"]["name"]}
        document |= {"attention": attention, "batch": batches.copy().pop(), "dtype": result["model"]["dtype"]}
        document |= {"lengths": rows}
        if result["checkpoint"] and name == AS_SAVED:
            document["checkpoint"] = result["checkpoint"]
        parse_result(document)
        documents[name] = document
    return documents


def name_of_pass(training: bool) -> str:
    return "training step" if training else "inference"


def rows_of(result: Document, attention: str, training: bool) -> list[dict[str, Any]]:
    """Cells of one attention and pass, by length."""
    found = [c for c in result["cells"] if (c["attention"], c["training"]) == (attention, training)]
    return sorted(found, key=lambda cell: cell["length"])


def report(result: Document, name: str) -> list[Block]:
    """Speed over softmax and memory by length, break-even lengths, and a plot."""
    found = {(each["attention"], each["training"]): crossover_text(each) for each in result["crossovers"]}
    rows = []
    for training, attention in itertools.product(result["training"], [SOFTMAX, *result["attention"]]):
        row = []
        for cell in rows_of(result, attention, training):
            size = "" if cell["step_bytes"] is None else f", {cell['step_bytes'] / 2**20:,.0f} MiB"
            first = f"{cell['tokens_per_second']:,.0f} tokens/s" if attention == SOFTMAX else None
            row.append((first or times(cell["speed_over_softmax"])) + size)
        rows.append([name_of_pass(training), attention, *row, found.get((attention, training), "")])
    headings = ["", "", *(f"{length:,} tokens" for length in result["lengths"]), "faster from (break-even)"]
    what = f"{result['model']['name']}: time and memory by length, log-log"
    return [Table("", headings, rows, aligned=False), Image(f"{name}.png", what, partial(plot, result))]


def plot(result: Document) -> Any:
    """Time of a sample by length for each pass, with crossovers, and the memory of the last pass; log-log."""
    from matplotlib.figure import Figure

    from ..results.plots import draw_line, line_style, log_log, mark_crossover, title_and_legend

    passes, model = result["training"], result["model"]
    figure = Figure(figsize=(5 * (len(passes) + 1), 5), layout="constrained")
    *panels, memory = figure.subplots(1, len(passes) + 1, squeeze=False)[0]
    for axes, training in zip(panels, passes, strict=True):
        medians: dict[str, list[float]] = {}
        for name in [SOFTMAX, *result["attention"]]:
            row = rows_of(result, name, training)
            lower, medians[name], upper = (
                [cell["milliseconds"][key] / cell["batch"] for cell in row] for key in ("lower", "median", "upper")
            )
            lengths = [cell["length"] for cell in row]
            draw_line(axes, lengths, medians[name], (lower, upper), label=name, **line_style(name))
        axes.set(title=name_of_pass(training).capitalize(), xlabel="length (tokens)", ylabel="milliseconds a sample")
        log_log(axes, result["lengths"])
        found = [each for each in result["crossovers"] if each["training"] == training and each["interpolated"]]
        for number, each in enumerate(found):
            softmax = dict(zip(result["lengths"], medians[SOFTMAX], strict=True))
            mark_crossover(axes, each["interpolated"], softmax, number, line_style(each["attention"])["color"])
    for name in [SOFTMAX, *result["attention"]]:
        row = [cell for cell in rows_of(result, name, passes[-1]) if cell["step_bytes"]]
        memory.plot([c["length"] for c in row], [c["step_bytes"] / 2**20 for c in row], **line_style(name))
    memory.set(title=f"Memory, {name_of_pass(passes[-1])}", xlabel="length (tokens)", ylabel="MiB")
    log_log(memory, result["lengths"])
    size = f"{model['layers']} layers, {model['parameters'] / 1e6:.0f} M"
    title_and_legend(figure, f"{model['name']} ({size}), {model['dtype']}, {machine(result['hardware'])}")
    return figure
