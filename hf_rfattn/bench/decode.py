"""Generating one token after a context of n: milliseconds and bytes of cache, softmax against mechanisms.

What is timed is one forward pass of the whole model with its cache, as each step of `generate` makes it (the mask of
all ones included), several in a row; choosing the token is left out. The context is not computed, which would take
hours on a CPU:

- Softmax's time after n tokens depends on the size of its cache alone. A `DynamicCache` is filled with n random keys
  and values a layer. Every step then pays what it pays in `generate`: `torch.cat` copies keys and values of each layer
  to append one, and attention reads them.
- A `StaticCache` has room for all tokens from the start: a step writes one row and copies nothing.
- A patched layer's state has one size. It is made by a short prompt, and told that it has seen n tokens. If it holds
  all keys, it is filled with n random ones.

Before each timed row of steps, off the clock, the cache is cut back to n - 1 tokens, contiguous as `torch.cat` leaves
it, and one step is made, so that what is timed begins after n tokens and in the wake of its own kind. All mechanisms
at one context are interleaved.
"""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ..integration.cache import RecurrentLayer
from ..integration.discovery import find_attention
from ..mechanisms import MechanismConfig, mechanism_names
from ..ops.multipole_causal import Context
from ..results import (
    SOFTMAX,
    Block,
    Bullets,
    Image,
    Table,
    in_bytes,
    load_average,
    machine,
    name_of,
    new_result,
    rounded,
)
from .devices import check_device, check_dtype
from .loading import SHAPES, describe, load_model, named_configs, share_weights
from .settings import DecodeSettings
from .timing import Competitor, Spread, interleave, median_ratio, synchroniser, threads

PROMPT = 64  # tokens, or fewer, that make a state
WARMUP = 1  # repetitions
STATIC = f"{SOFTMAX}, static cache"

Document = dict[str, Any]
Progress = Callable[[float, str], Any]


def mechanisms(settings: DecodeSettings) -> dict[str, MechanismConfig]:
    """Those that were asked for, or all."""
    names = [name for name in settings.attention if name != SOFTMAX] if settings.attention else mechanism_names()
    return named_configs(names)


def measure(settings: DecodeSettings, progress: Progress = lambda share, doing: None) -> Document:
    """The result document. `progress` is told the share of the work that is done and what is being done."""
    check_device(settings.device)
    check_dtype(settings.dtype, settings.device)
    if min(settings.contexts) < 2:
        raise ValueError("A context must have at least 2 tokens.")
    started, attention = time.perf_counter(), mechanisms(settings)
    with threads(settings.threads), torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        result = new_result("bench decode", seed=settings.seed, device=settings.device)
        progress(0, f"loading {settings.model}")
        length = max(settings.contexts) + settings.tokens
        place = {"dtype": settings.dtype, "device": settings.device}
        models = share_weights(
            load_model(settings.model, length, kind=AutoModelForCausalLM, **place), attention, settings.seed
        )
        static = StaticCache(models[SOFTMAX].config, max_cache_len=length)
        if all(type(layer) is StaticLayer for layer in static.layers):
            models = {SOFTMAX: models[SOFTMAX], STATIC: models[SOFTMAX], **models}
        cells: list[dict[str, Any]] = []
        timed_runs = (WARMUP + settings.repetitions) * len(models) * len(settings.contexts) * len(settings.batches)
        done = itertools.count(1)
        for batch, context in itertools.product(settings.batches, settings.contexts):
            advance = lambda key, batch=batch: progress(next(done) / timed_runs, f"batch {batch}")  # noqa: E731
            cells += _measure_group(models, batch, [context], settings, advance)
    name = f"{settings.model}-shaped, random weights" if settings.model in SHAPES else name_of(settings.model)
    return {
        **result,
        "model": describe(models[SOFTMAX], name, settings.dtype),
        "attention": {name: config.to_dict() for name, config in attention.items()},
        "contexts": list(settings.contexts),
        "batches": list(settings.batches),
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "tokens_per_repetition": settings.tokens,
        "cells": cells,
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


class Decoder:
    """A model and a cache with `context` tokens in it."""

    def __init__(
        self, model: PreTrainedModel, batch: int, context: int, tokens: int, seed: int, *, static: bool = False
    ):
        self.model, self.context, self.tokens = model, context, tokens
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.cache: Any = DynamicCache(config=model.config)
        if static:
            self.cache = StaticCache(model.config, max_cache_len=context + tokens)
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
        elif type(layer) is StaticLayer:
            for tensor in (layer.keys, layer.values):
                tensor.normal_(generator=self.generator)  # type: ignore[union-attr]
        elif isinstance(layer, RecurrentLayer) and isinstance(layer.state, Context):
            layer.state.reset()
            shapes = ((*x.shape[:2], self.context - 1, x.shape[3]) for x in (layer.state.keys, layer.state.values))
            k, v = (torch.randn(shape, generator=self.generator, device=self.model.device) for shape in shapes)
            with torch.no_grad():
                layer.state.copy_(layer.state.extended(k, v, None)[0])
        elif not isinstance(layer, RecurrentLayer):
            raise ValueError(
                f"bench decode knows no way to lengthen a {type(layer).__name__} of {type(self.model).__name__}."
            )

    def _rewind(self, layer: Any) -> None:
        if isinstance(layer, RecurrentLayer):
            layer.seen = self.context - 1
            if isinstance(layer.state, Context):
                layer.state.rewind(self.context - 1)
            return
        if isinstance(layer, StaticLayer):
            layer.cumulative_length.fill_(self.context - 1)  # type: ignore[attr-defined]
            return
        layer.keys = layer.keys[:, :, : self._kept(layer)].contiguous()
        layer.values = layer.values[:, :, : self._kept(layer)].contiguous()
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = self.context - 1

    def _kept(self, layer: DynamicLayer) -> int:
        """How many keys a layer holds before the step that `prepare` makes."""
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else math.inf
        return int(min(self.context - 1, window - 1))


def _measure_group(
    models: dict[str, PreTrainedModel],
    batch: int,
    contexts: list[int],
    settings: DecodeSettings,
    advance: Callable[[Any], Any],
) -> list[dict[str, Any]]:
    """One batch: all competitors at all these contexts interleaved."""
    device = torch.device(settings.device)
    skipped = {context: _too_large(models[SOFTMAX], batch, context, device) for context in contexts}
    decoders, held = {}, {}
    for context in contexts:
        for name, model in models.items():
            if name in (SOFTMAX, STATIC) and skipped[context]:
                continue
            decoder = Decoder(model, batch, context, settings.tokens, settings.seed, static=name == STATIC)
            decoder.prepare()
            decoders[name, context] = decoder
            held[name, context] = cache_bytes(decoder.cache)
    seconds = interleave(
        {key: Competitor(decoder.run, decoder.prepare) for key, decoder in decoders.items()},
        settings.repetitions,
        warmup=WARMUP,
        seed=settings.seed,
        synchronise=synchroniser(device),
        after_each=advance,
    )
    cells = []
    for context in contexts:
        for name in models:
            cell: dict[str, Any] = {"attention": name, "batch": batch, "context": context}
            cells.append(cell)
            if (name, context) not in decoders:
                cell["skipped"] = skipped[context]
                continue
            own = seconds[name, context]
            softmax, static = (seconds.get((key, context)) for key in (SOFTMAX, STATIC))
            spread = Spread.of([1000 * s / settings.tokens for s in own])
            cell |= {
                "ms_per_token": spread.to_dict(),
                "tokens_per_second": rounded(1000 * batch / spread.median),
                "tokens_per_second_over_softmax": None if softmax is None else rounded(median_ratio(softmax, own)),
                "tokens_per_second_over_static_cache": None if static is None else rounded(median_ratio(static, own)),
                "cache_bytes": held[name, context],
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


def report(result: Document, name: str) -> list[Block]:
    """Time for each batch, bytes of one sequence, what was left out, and a plot."""
    first, what = result["batches"][0], "Time of a token and bytes of cache by context"
    blocks: list[Block] = [time_table(result, batch) for batch in result["batches"]]
    rows = _rows(result, first, lambda cell: in_bytes(cell["cache_bytes"] / first))
    blocks.append(Table("Bytes of cache, one sequence", _headings(result), rows))
    skipped = [
        f"Not measured: {cell['attention']}, context {cell['context']:,}, batch {cell['batch']}: {cell['skipped']}"
        for cell in result["cells"]
        if "skipped" in cell
    ]
    blocks += [Bullets(skipped)] if skipped else []
    return [*blocks, Image(f"{name}.png", what, partial(plot, result))]


def time_table(result: Document, batch: int, title: bool = True) -> Table:
    rows = _rows(result, batch, lambda cell: f"{cell['ms_per_token']['median']:.1f}")
    return Table(f"Milliseconds a token, batch {batch}" if title else "", _headings(result), rows, aligned=False)


def _headings(result: Document) -> list[str]:
    return ["", *(f"{context:,} tokens" for context in result["contexts"])]


def _rows(result: Document, batch: int, text: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    cells = {(c["attention"], c["context"]): c for c in result["cells"] if c["batch"] == batch and "skipped" not in c}
    return [
        [name, *(text(cells[name, c]) if (name, c) in cells else "–" for c in result["contexts"])]
        for name in _names(result)
    ]


def _names(result: Document) -> list[str]:
    """Of the rows, in the order measured."""
    return list(dict.fromkeys(cell["attention"] for cell in result["cells"]))


def plot(result: Document) -> Any:
    """Time (a panel each batch, quartiles shaded) and bytes by context, log-log."""
    from matplotlib.figure import Figure

    from ..results.plots import draw_line, line_style, log_log, title_and_legend

    contexts, batches, model = result["contexts"], result["batches"], result["model"]
    figure = Figure(figsize=(4.6 * (len(batches) + 1), 5), layout="constrained")
    *left, right = figure.subplots(1, len(batches) + 1, squeeze=False)[0]
    for name in _names(result):
        style = line_style(name)
        for axes, batch in zip(left, batches, strict=True):
            cells = [c for c in result["cells"] if (c["attention"], c["batch"]) == (name, batch) and "skipped" not in c]
            x = [cell["context"] for cell in cells]
            lower, median, upper = ([c["ms_per_token"][key] for c in cells] for key in ("lower", "median", "upper"))
            draw_line(axes, x, median, (lower, upper), label=name, **style)
            axes.set(title=f"Time per token, batch {batch}", xlabel="context (tokens)", ylabel="milliseconds")
            if batch == batches[0]:
                right.plot(x, [cell["cache_bytes"] / batch / 2**20 for cell in cells], **style)
    right.set(title="Cache of one sequence", xlabel="context (tokens)", ylabel="MiB")
    limits = [axes.get_ylim() for axes in left]
    for axes in left:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for axes in (*left, right):
        log_log(axes, contexts)
    shape = f"{model['layers']} layers, {model['heads']} heads of {model['head_dim']}"
    where = f"{model['dtype']}, {machine(result['hardware'])}"
    title_and_legend(figure, f"Generating a token: {model['name']} ({shape}), {where}")
    return figure
