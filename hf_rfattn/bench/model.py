"""Benchmark of whole models by input length: forward pass and training step, softmax and mechanisms.

Inference is a forward pass without gradients. A training step is a forward pass in training mode, a backward pass from
the mean square of the model's first output (as expensive as a loss on that output, except for the loss itself), and an
AdamW step. The model has its own head: a language model computes the logits of all tokens. Attention dropout is off for
all models: patched layers have none, and torch's fused softmax kernels have none on a CPU.

All models share the same weights and run alternately. The memory of a step is measured in a separate run after timing:
the peak resident set minus that before the run (on CUDA, torch's allocations). It includes gradients and activations,
but not weights and the state of AdamW.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..integration.names import SPEC
from ..integration.reading import load_config
from ..mechanisms import Mechanism, MechanismConfig
from ..results.documents import checkpoint_fingerprint, rounded
from ..results.schema import SOFTMAX, parse_result
from .loading import SHAPES, describe, load_model, named_configs, random_tokens, share_weights
from .measuring import COMPILED, FUSED, TORCH, Competitor, Document, Progress, Race, Row, measure_rounds, measuring
from .report import Cell, cells_of, report
from .settings import ModelSettings

__all__ = ["measure", "report", "speed_documents"]

LEARNING_RATE = 1e-6  # small, so that weights hardly change; the cost of a step does not depend on it
AS_SAVED = "as saved"


def measure(settings: ModelSettings, progress: Progress = lambda share, doing: None) -> Document:
    """Run the benchmark and return its result document. `progress(share, doing)` is called with the progress."""
    attention: dict[str, Any] = dict(named_configs(settings.attention))  # unknown names fail now
    given = settings.model
    with measuring("bench model", settings) as result:
        progress(0, f"loading {given}")
        model = load_model(given, max(settings.lengths), dtype=settings.dtype, device=settings.device)
        if model.main_input_name != "input_ids":
            raise ValueError(f"{type(model).__name__} takes {model.main_input_name}; bench model supports text only.")
        model.config.get_text_config().use_cache = False
        attention = attention or _as_saved(given) or dict(named_configs(["favor+"]))
        models = share_weights(model, attention, settings.seed)
        description = describe(model, given, settings.dtype)
        result |= {
            "model": description | ({"name": settings.base_model} if settings.base_model else {}),
            "checkpoint": checkpoint_fingerprint(given) if (Path(given) / "config.json").exists() else None,
            "attention": {
                name: config.to_dict() if isinstance(config, MechanismConfig) else {"layers": config}
                for name, config in attention.items()
            },
            "weights_bytes": sum(x.nbytes for x in (*model.parameters(), *model.buffers())),
        }
        calls = _calls(models, settings.paths)

        def competitors(training: bool, batch: int, length: int) -> dict[Row, Competitor]:
            inputs = random_tokens(model, batch, length, settings.seed)
            optimizers = _optimizers(models) if training else {}
            for each in models.values():
                each.train(training)
            if training:
                return {
                    row: Competitor(partial(_train, c, optimizers[row.attention], inputs)) for row, c in calls.items()
                }
            return {row: Competitor(partial(_infer, call, inputs)) for row, call in calls.items()}

        def columns(race: Race, row: Row) -> dict[str, Any]:
            seconds = statistics.median(race.seconds[row])
            samples = {"samples_per_second": rounded(settings.batch / seconds)}
            return samples | {"step_bytes": race.step_bytes(row, settings.device)}

        rounds = [
            {"training": training, "batch": settings.batch, "length": length}
            for training, length in itertools.product(settings.passes, settings.lengths)
        ]
        measure_rounds(result, settings, rounds, competitors, columns, progress)
    return result


def _as_saved(name: str) -> dict[str, Any]:
    """The attention of a patched checkpoint, by layers; empty for other models."""
    spec = None if name in SHAPES else getattr(load_config(name).get_text_config(), SPEC, None)
    return {AS_SAVED: spec["layers"]} if spec else {}


def _calls(models: dict[str, PreTrainedModel], paths: Sequence[str]) -> dict[Row, Any]:
    """The callable of each row. Softmax has no fused row, since torch's attention is already fused."""
    calls: dict[Row, Any] = {Row(SOFTMAX): models[SOFTMAX]}
    for (name, model), path in itertools.product(models.items(), paths):
        if name != SOFTMAX or path != FUSED:
            calls[Row(name, _features(model), path)] = torch.compile(model) if path == COMPILED else model
    return calls


@torch.no_grad()
def _infer(model: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> None:
    model(**inputs)


def _train(model: Any, optimizers: list[torch.optim.Optimizer], inputs: Mapping[str, torch.Tensor]) -> None:
    model(**inputs)[0].float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def _optimizers(models: dict[str, PreTrainedModel]) -> dict[str, list[torch.optim.Optimizer]]:
    """One optimizer for the shared weights, and one for the parameters of each mechanism."""
    shared = list(models[SOFTMAX].parameters())
    known = {id(parameter) for parameter in shared}
    common = torch.optim.AdamW(shared, lr=LEARNING_RATE)
    found: dict[str, list[torch.optim.Optimizer]] = {}
    for name, model in models.items():
        own = [parameter for parameter in model.parameters() if id(parameter) not in known]
        found[name] = [common, torch.optim.AdamW(own, lr=LEARNING_RATE)] if own else [common]
    return found


def _features(model: PreTrainedModel) -> int | None:
    """Number of features in the first patched layer."""
    return next((module.num_features for module in model.modules() if isinstance(module, Mechanism)), None)


def speed_documents(result: Document) -> dict[str, Document]:
    """Convert a result to documents of kind "speed" (`results/schema.py`) for model cards, by name of the mechanism.

    Times are those of the fused path if it was measured, since it is then the default, otherwise of the torch path.
    Peak memory is that of a forward pass, including the weights.
    """
    cells: dict[str, dict[int, Cell]] = {}
    for path in (TORCH, FUSED):
        inference = [cell for cell in cells_of(result) if not cell["training"] and cell["path"] == path]
        for cell in inference:
            cells.setdefault(cell["attention"], {})[cell["length"]] = cell
    shared = ("schema_version", "created", "git", "versions", "hardware", "load_average", "seed")
    documents = {}
    for name, attention in result["attention"].items():
        rows = []
        for length, own in cells.get(name, {}).items():
            row: dict[str, Any] = {"length": length}
            for whose, cell in ((SOFTMAX, cells[SOFTMAX][length]), ("patched", own)):
                row[f"{whose}_seconds"] = rounded(cell["milliseconds"]["median"] / 1000)
                if cell["step_bytes"]:
                    row[f"{whose}_peak_bytes"] = result["weights_bytes"] + cell["step_bytes"]
            rows.append(row)
        if rows:
            document = {key: result[key] for key in shared} | {"kind": "speed", "model": result["model"]["name"]}
            document |= {"attention": attention, "batch": own["batch"], "dtype": result["model"]["dtype"]}
            document |= {"lengths": rows}
            if result["checkpoint"] and name == AS_SAVED:
                document["checkpoint"] = result["checkpoint"]
            parse_result(document)
            documents[name] = document
    return documents
