"""Generating one token after a context of n: milliseconds and bytes of cache, softmax against mechanisms.

What is timed is one forward pass of the whole model with its cache, as each step of `generate` makes it (the mask of
all ones included), several in a row; choosing the token is left out. The context is not computed, which would take
hours on a CPU:

- Softmax's time after n tokens depends on the size of its cache alone. A `DynamicCache` is filled with n random keys
  and values a layer. Every step then pays what it pays in `generate`: `torch.cat` copies keys and values of each layer
  to append one, and attention reads them.
- A patched layer's state has one size. It is made by a short prompt, and told that it has seen n tokens.

Before each timed row of steps, off the clock, the cache is cut back to n - 1 tokens, contiguous as `torch.cat` leaves
it, and one step is made, so that what is timed begins after n tokens and in the wake of its own kind. All mechanisms
at all contexts whose caches fit into memory together are interleaved.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .. import patch_model, unpatch_model
from ..integration.cache import RecurrentLayer
from ..integration.cost import attention_cost
from ..integration.discovery import find_attention
from ..integration.loading import load_config, longest_input
from ..mechanisms import MechanismConfig, mechanism_names, resolve_config
from ..results import SOFTMAX, load_average, name_of, new_result, rounded
from ..results.plots import BASELINE
from ..results.units import in_bytes
from .contenders import named_configs
from .devices import DTYPES, check_device, check_dtype
from .timing import Competitor, Spread, Watch, interleave, median_ratio, synchroniser, threads

PROMPT = 64  # tokens, or fewer, that make a state
WARMUP = 1  # repetitions


@dataclass(frozen=True)
class Settings:
    """What to measure.

    `attention`: names, or all mechanisms if empty; softmax is always measured. `model`: None for random weights in the
    shape of gpt2. `patience`: seconds to wait, in all, for other processes to be quiet.
    """

    contexts: list[int]
    batches: list[int]
    attention: list[str]
    model: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    repetitions: int = 7
    tokens: int = 8
    patience: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if min(self.contexts) < 2:
            raise ValueError("A context must have at least 2 tokens.")
        check_device(self.device)
        _ = self.mechanisms  # unknown names fail now

    @property
    def mechanisms(self) -> dict[str, MechanismConfig]:
        names = [name for name in self.attention if name != SOFTMAX] if self.attention else mechanism_names()
        return named_configs(names)

    @property
    def runs(self) -> int:
        """How many timed rows of steps there will be."""
        rows = (WARMUP + self.repetitions) * (1 + len(self.mechanisms))
        return rows * len(self.contexts) * len(self.batches)


def measure_decode(settings: Settings, advance: Callable[[str], Any] = lambda doing: None) -> dict[str, Any]:
    """The result document. `advance` is called after each timed row of steps with what is being done."""
    started = time.perf_counter()
    with threads(settings.threads):
        result = new_result("bench decode", seed=settings.seed, device=settings.device)
        models = share_weights(load_model(settings), settings.mechanisms, settings.seed)
        _check_positions(models[SOFTMAX], max(settings.contexts) + settings.tokens)
        cells = []
        watch = Watch(settings.patience)
        for batch in settings.batches:
            free = free_memory(torch.device(settings.device))
            for contexts in _groups(models[SOFTMAX], batch, settings.contexts, free):
                cells += _measure_group(models, batch, contexts, settings, watch, advance)
    return {
        **result,
        "model": describe(models[SOFTMAX], name_of(settings.model or "gpt2-shaped, random weights"), settings.dtype),
        "attention": {name: config.to_dict() for name, config in settings.mechanisms.items()},
        "contexts": settings.contexts,
        "batches": settings.batches,
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "tokens_per_repetition": settings.tokens,
        "cells": cells,
        "neighbours": watch.to_dict(),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


def load_model(settings: Settings) -> PreTrainedModel:
    """The model to measure, with softmax attention through sdpa."""
    dtype = DTYPES[settings.dtype]
    model: PreTrainedModel
    if settings.model is None:
        positions = max(settings.contexts) + settings.tokens
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = GPT2LMHeadModel(GPT2Config(n_positions=positions))
    else:
        load_config(settings.model)  # for its clear errors
        model = unpatch_model(AutoModelForCausalLM.from_pretrained(settings.model, trust_remote_code=False))
    model.set_attn_implementation("sdpa")
    nn.Module.to(model, device=settings.device, dtype=dtype)
    return model.eval()


def share_weights(model: PreTrainedModel, mechanisms: Mapping[str, Any], seed: int) -> dict[str, PreTrainedModel]:
    """The model and a patched copy for each mechanism; all of them hold the same weights, not copies of them.

    `mechanisms`: what `patch_model` takes, by name.
    """
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    models = {SOFTMAX: model}
    for name, config in mechanisms.items():
        models[name] = patch_model(copy.deepcopy(model, dict(weights)), config, seed=seed).eval()
    return models


@torch.no_grad()
def _check_positions(model: PreTrainedModel, length: int) -> None:
    """Find out before the first measurement, and at no cost, that a model has too few positions."""
    patched = share_weights(model, {BASELINE: resolve_config(BASELINE)}, 0)[BASELINE]
    try:
        Decoder(patched, batch=1, context=length - 1, tokens=1, seed=0).prepare()
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"This {model.config.model_type} has {longest_input(model)} positions, fewer than the {length} that the "
            "longest context and the tokens after it need; give shorter --contexts."
        ) from error


def describe(model: PreTrainedModel, name: str, dtype: str) -> dict[str, Any]:
    """What a result says of a model."""
    sites = [site for site in find_attention(model) if not site.cross]
    return {
        "name": name,
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": dtype,
        "layers": len(sites),
        "heads": sites[0].num_heads,
        "kv_heads": sites[0].num_kv_heads,
        "head_dim": sites[0].head_dim,
    }


class Decoder:
    """A model and a cache with `context` tokens in it."""

    def __init__(self, model: PreTrainedModel, batch: int, context: int, tokens: int, seed: int):
        self.model, self.context, self.tokens = model, context, tokens
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.cache = DynamicCache(config=model.config)
        self.mask = torch.ones(batch, context + tokens, dtype=torch.long, device=model.device)
        vocabulary = model.config.get_text_config().vocab_size
        shape = (batch, min(PROMPT, context - 1))
        prompt = torch.randint(vocabulary, shape, generator=self.generator, device=model.device)
        self.token = prompt[:, :1]
        self._forward(prompt, self.mask[:, : shape[1]])
        for layer in self.cache.layers:
            self._lengthen(layer)

    def prepare(self) -> None:
        """Cut the cache back and make the one step that brings it to `context` tokens."""
        for layer in self.cache.layers:
            self._rewind(layer)
        self.length = self.context - 1
        self.step()

    def run(self) -> None:
        for _ in range(self.tokens):
            self.step()

    def step(self) -> None:
        self.length += 1
        self._forward(self.token, self.mask[:, : self.length])

    @torch.no_grad()
    def _forward(self, tokens: Tensor, mask: Tensor) -> None:
        self.model(input_ids=tokens, attention_mask=mask, past_key_values=self.cache, use_cache=True)

    def _lengthen(self, layer: Any) -> None:
        """Random keys and values in place of the prompt's, as many as the context needs."""
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_empty(*old.shape[:2], self._kept(layer), old.shape[3])
                setattr(layer, name, new.normal_(generator=self.generator))
        elif not isinstance(layer, RecurrentLayer):
            raise ValueError(
                f"bench decode knows no way to lengthen a {type(layer).__name__} of {type(self.model).__name__}."
            )

    def _rewind(self, layer: Any) -> None:
        if isinstance(layer, RecurrentLayer):
            layer.seen = self.context - 1
            return
        layer.keys = layer.keys[:, :, : self._kept(layer)].contiguous()
        layer.values = layer.values[:, :, : self._kept(layer)].contiguous()
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = self.context - 1

    def _kept(self, layer: DynamicLayer) -> int:
        """How many keys a layer holds before the step that `prepare` makes."""
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else math.inf
        return int(min(self.context - 1, window - 1))


def _groups(model: PreTrainedModel, batch: int, contexts: list[int], free: int) -> list[list[int]]:
    """Contexts to measure together: as many as let their softmax caches fit in half of the free memory at once."""
    groups: list[list[int]] = [[]]
    room = free / 2
    for context in contexts:
        needed = softmax_bytes(model, batch, context)
        if groups[-1] and needed > room:
            groups.append([])
            room = free / 2
        groups[-1].append(context)
        room -= needed
    return groups


def _measure_group(
    models: dict[str, PreTrainedModel],
    batch: int,
    contexts: list[int],
    settings: Settings,
    watch: Watch,
    advance: Callable[[str], Any],
) -> list[dict[str, Any]]:
    """One batch: all competitors at all these contexts interleaved."""
    device = torch.device(settings.device)
    skipped = {context: _too_large(models[SOFTMAX], batch, context, device) for context in contexts}
    decoders, held = {}, {}
    for context in contexts:
        for name, model in models.items():
            if name == SOFTMAX and skipped[context]:
                continue
            decoder = Decoder(model, batch, context, settings.tokens, settings.seed)
            decoder.prepare()
            decoders[name, context] = decoder
            held[name, context] = cache_bytes(decoder.cache)
    seconds = interleave(
        {key: Competitor(decoder.run, decoder.prepare) for key, decoder in decoders.items()},
        settings.repetitions,
        warmup=WARMUP,
        seed=settings.seed,
        watch=watch,
        synchronise=synchroniser(device),
        after_each=lambda key: advance(f"batch {batch}"),
    )
    cells = []
    for context in contexts:
        for name, model in models.items():
            cell: dict[str, Any] = {"attention": name, "batch": batch, "context": context}
            cells.append(cell)
            if (name, context) not in decoders:
                cell["skipped"] = skipped[context]
                continue
            own, softmax = seconds[name, context], seconds.get((SOFTMAX, context))
            spread = Spread.of([1000 * s / settings.tokens for s in own])
            cell |= {
                "ms_per_token": spread.to_dict(),
                "tokens_per_second": rounded(1000 * batch / spread.median),
                "tokens_per_second_over_softmax": None if softmax is None else rounded(median_ratio(softmax, own)),
                "cache_bytes": held[name, context],
                "predicted_cache_bytes": predicted_cache_bytes(model, batch, context),
            }
    return cells


def cache_bytes(cache: Any) -> int:
    """Bytes that the tensors of a cache hold."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            total += layer.nbytes()
        else:
            total += sum(tensor.untyped_storage().nbytes() for tensor in (layer.keys, layer.values))
    return total


def predicted_cache_bytes(model: PreTrainedModel, batch: int, context: int) -> int | None:
    """The same as `hf-rfattn inspect` counts it; None where some layers see a window or stay softmax."""
    sites = [site for site in find_attention(model) if not site.cross]
    mechanisms = [getattr(site.module, "rf", None) for site in sites]
    if all(mechanism is None for mechanism in mechanisms):
        return None if any(site.refusal for site in sites) else softmax_bytes(model, batch, context)
    if any(mechanism is None for mechanism in mechanisms):
        return None
    return batch * sum(attention_cost(m, context, causal=True, dtype=model.dtype).memory for m in mechanisms if m)


def softmax_bytes(model: nn.Module, batch: int, context: int) -> int:
    """Keys and values of all layers, as if all saw the whole context."""
    sites = [site for site in find_attention(model) if not site.cross]
    return sum(2 * batch * site.num_kv_heads * context * site.head_dim for site in sites) * model.dtype.itemsize  # type: ignore


def _too_large(model: PreTrainedModel, batch: int, context: int, device: torch.device) -> str | None:
    """Why softmax cannot be measured here: its cache, and a copy of one layer while it grows, do not fit in memory."""
    layers = sum(not site.cross for site in find_attention(model))
    needed = int(softmax_bytes(model, batch, context) * (1 + 2 / layers) * 1.05)
    free = free_memory(device)
    if needed <= free:
        return None
    return f"needs {in_bytes(needed)} of memory, {in_bytes(free)} are free"


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
