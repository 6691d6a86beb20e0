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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import unpatch_model
from ..integration.cost import is_causal
from ..integration.discovery import find_attention
from ..integration.loading import load_config, longest_input, model_class
from ..integration.names import SPEC
from ..mechanisms import Mechanism, MechanismConfig, resolve_config
from ..results import (
    SOFTMAX,
    checkpoint_fingerprint,
    load_average,
    measured_crossover,
    name_of,
    new_result,
    parse_result,
    rounded,
)
from ..results.plots import BASELINE
from .contenders import named_configs
from .decode import describe, share_weights
from .devices import DTYPES, check_bfloat16_products, check_device, check_dtype
from .memory import bytes_around
from .timing import Competitor, Spread, Watch, interleave, median_ratio, synchroniser, threads

WARMUP = 1  # repetitions
LEARNING_RATE = 1e-6  # so small that weights stay what they are; the cost of a step does not depend on it
AS_SAVED = "as saved"
DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "attn_dropout")

Report = Callable[[float, str], Any]


def bert(length: int) -> PreTrainedModel:
    """Shaped like bert-base, a classifier, for inputs of `length` tokens."""
    config = transformers.BertConfig(max_position_embeddings=length, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def gpt2(length: int) -> PreTrainedModel:
    """Shaped like gpt2, a language model."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=length, attn_pdrop=0.0))


SHAPES: dict[str, Callable[[int], PreTrainedModel]] = {"bert": bert, "gpt2": gpt2}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    `model`: one of `SHAPES`, for random weights, or a folder or a name on the Hub. `attention`: names of mechanisms;
    none means favor+, or for a patched checkpoint what it was saved with. `base_model`: what results call the model;
    cards want its name on the Hub. `batch`: None makes it as large as a step of `tokens` allows, at every length anew.
    """

    lengths: list[int]
    attention: list[str]
    model: str = "bert"
    base_model: str | None = None
    training: tuple[bool, ...] = (False, True)
    batch: int | None = 1
    tokens: int = 4096
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    repetitions: int = 6
    max_seconds: float = 10
    patience: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_device(self.device)
        named_configs(self.attention)  # unknown names fail now
        if self.dtype == "bfloat16" and torch.device(self.device).type == "cpu":
            check_bfloat16_products()

    def batch_at(self, length: int) -> int:
        return self.batch or max(1, self.tokens // length)

    @property
    def model_name(self) -> str:
        """A folder is called by its own name, never by its path."""
        if self.model in SHAPES:
            return self.base_model or f"{self.model}-shaped, random weights"
        return self.base_model or name_of(self.model)


def measure_model(settings: Settings, progress: Report = lambda share, doing: None) -> dict[str, Any]:
    """The result document. `progress` is told the share of the work that is done and what is being done."""
    started = time.perf_counter()
    with threads(settings.threads), torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        result = new_result("bench model", seed=settings.seed, device=settings.device)
        progress(0, f"loading {settings.model}")
        model, attention = load_model(settings)
        models = share_weights(model, attention, settings.seed)
        _check_length(model, settings)
        description = describe(model, settings.model_name, settings.dtype) | {"causal": _causal(model)}
        watch = Watch(settings.patience)
        rounds = list(itertools.product(settings.training, settings.lengths))
        work = [length * (length + 4096) * (3 if training else 1) for training, length in rounds]
        cells: list[dict[str, Any]] = []
        for number, (training, length) in enumerate(rounds):
            doing = f"{settings.model}, {'training step' if training else 'inference'}, {length:,} tokens"
            progress(sum(work[:number]) / sum(work), doing)
            cells += _measure_round(models, settings, training, length, watch)
    return {
        **result,
        "model": description,
        "checkpoint": _fingerprint(settings),
        "attention": {
            name: given.to_dict() if isinstance(given, MechanismConfig) else {"layers": given}
            for name, given in attention.items()
        },
        "lengths": settings.lengths,
        "batches": [settings.batch_at(length) for length in settings.lengths],
        "training": list(settings.training),
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "max_seconds": settings.max_seconds,
        "weights_bytes": sum(x.nbytes for x in (*model.parameters(), *model.buffers())),
        "cells": cells,
        "crossovers": list(_crossovers(cells, description)),
        "neighbours": watch.to_dict(),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


def load_model(settings: Settings) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with softmax through sdpa, and what to patch it with: configs, or a mapping from layers to them."""
    if settings.model in SHAPES:
        model = SHAPES[settings.model](max(settings.lengths))
        spec = None
    else:
        config = load_config(settings.model)
        for part in (config, config.get_text_config()):
            for name in DROPOUTS:
                if hasattr(part, name):
                    setattr(part, name, 0.0)
        spec = getattr(config.get_text_config(), SPEC, None)
        kind = model_class(config)
        model = unpatch_model(kind.from_pretrained(settings.model, config=config, trust_remote_code=False))
    if model.main_input_name != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {model.main_input_name}; bench model gives it tokens.")
    model.set_attn_implementation("sdpa")
    model.config.get_text_config().use_cache = False
    nn.Module.to(model, device=settings.device, dtype=DTYPES[settings.dtype])
    if spec is not None and not settings.attention:
        return model, {AS_SAVED: spec["layers"]}
    return model, dict(named_configs(settings.attention or ["favor+"]))


def _check_length(model: PreTrainedModel, settings: Settings) -> None:
    """Find out before the first measurement that a model has too few positions; averaging is cheap."""
    if settings.model in SHAPES:
        return
    cheap = share_weights(model, {BASELINE: resolve_config(BASELINE)}, 0)[BASELINE]
    length = max(settings.lengths)
    try:
        _infer(cheap, _inputs(model, 1, length, settings.seed))
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"This {model.config.model_type} has {longest_input(model)} positions, too few for {length:,} tokens; give "
            "shorter --lengths."
        ) from error


def _inputs(model: PreTrainedModel, batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens, and the mask that a tokenizer gives where nothing is padded."""
    generator = torch.Generator(model.device).manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (batch, length), generator=generator, device=model.device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


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
    models: dict[str, PreTrainedModel], settings: Settings, training: bool, length: int, watch: Watch
) -> list[dict[str, Any]]:
    batch = settings.batch_at(length)
    inputs = _inputs(models[SOFTMAX], batch, length, settings.seed)
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
        watch=watch,
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


def _fingerprint(settings: Settings) -> str | None:
    return checkpoint_fingerprint(settings.model) if (Path(settings.model) / "config.json").exists() else None


def _crossovers(cells: list[dict[str, Any]], model: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, int | None, bool], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["attention"] != SOFTMAX:
            groups.setdefault((cell["attention"], cell["features"], cell["training"]), []).append(cell)
    for (name, features, training), row in groups.items():
        lengths = [cell["length"] for cell in row]
        length, interpolated = measured_crossover(lengths, [cell["speed_over_softmax"] for cell in row])
        found = {"attention": name, "features": features, "head_dim": model["head_dim"], "causal": model["causal"]}
        found |= {"training": training, "dtype": model["dtype"], "length": length, "interpolated": interpolated}
        yield found | {"lengths": lengths}


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
