"""Benchmark of generation: time per token and cache size after a context of n tokens, softmax and mechanisms.

Each timed run is several consecutive forward passes of the whole model with its cache, as in `generate` (with its mask
of ones), without the choice of the token. The context is not computed, which would take hours on a CPU:

- The time of softmax depends only on the size of its cache, so a `DynamicCache` is filled up to n with random keys and
  values. Each step costs what it costs in `generate`: `torch.cat` copies the keys and values of each layer to append
  one, and attention reads them.
- A `StaticCache` is allocated for all tokens, so a step writes one row and copies nothing. Compiled steps always use
  it.
- The state of a patched layer has a constant size. A short prompt creates it, and its token count is set to n. If it
  holds all keys, it is filled with n random ones.

Before each timed run, the cache is cut back to n - 1 tokens, and one step is run without timing. All mechanisms at one
context are interleaved.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from ..integration.cache import RecurrentLayer
from ..ops.multipole_causal import Context
from ..results.schema import SOFTMAX
from .loading import check_decoder, describe, load_model, named_configs, share_weights
from .measuring import COMPILED, Competitor, Document, Progress, Race, Row, measure_rounds, measuring
from .report import report
from .settings import DecodeSettings

__all__ = ["Decoder", "cache_bytes", "measure", "report"]

PROMPT = 64  # maximum number of tokens of the prompt that creates a state
STATIC = f"{SOFTMAX}, static cache"


def measure(settings: DecodeSettings, progress: Progress = lambda share, doing: None) -> Document:
    """Run the benchmark and return its result document. `progress(share, doing)` is called with the progress."""
    if min(settings.contexts) < 2:
        raise ValueError("A context must have at least 2 tokens.")
    attention = named_configs(name for name in settings.attention if name != SOFTMAX)
    longest = max(settings.contexts) + settings.tokens
    decoders: dict[Row, Decoder] = {}

    def competitors(batch: int, length: int) -> dict[Row, Competitor]:
        decoders.clear()
        for row in rows:
            kind = {"static": row.attention == STATIC, "compiled": row.path == COMPILED}
            sizes = batch, length, settings.tokens, settings.seed
            decoders[row] = Decoder(models[row.attention], *sizes, **kind)
        return {row: Competitor(d.run, d.prepare, settings.tokens) for row, d in decoders.items()}

    def columns(race: Race, row: Row) -> dict[str, Any]:
        race.competitors[row].prepare()  # the cache then holds exactly the context
        return {"cache_bytes": cache_bytes(decoders[row].cache)}

    with measuring("bench decode", settings) as result:
        progress(0, f"loading {settings.model}")
        place: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
        model = load_model(settings.model, longest, kind=AutoModelForCausalLM, **place)
        check_decoder(model, settings.model)
        models = share_weights(model, attention, settings.seed)
        result["model"] = describe(model, settings.model, settings.dtype)
        result["attention"] = {name: config.to_dict() for name, config in attention.items()}
        rows = [Row(SOFTMAX)]
        static = StaticCache(model.config, max_cache_len=longest)
        if all(type(layer) is StaticLayer for layer in static.layers):
            models[STATIC] = model
            rows += [Row(STATIC), *(Row(STATIC, None, path) for path in settings.paths if path == COMPILED)]
        rows += [Row(name, None, path) for name, path in itertools.product(attention, settings.paths)]
        rounds = [{"batch": settings.batch, "length": context} for context in settings.contexts]
        measure_rounds(result, settings, rounds, competitors, columns, progress)
    return result


def _contexts(state: Any) -> list[Context]:
    """The parts of a generation state that hold all keys."""
    return [part for part in (state, *vars(state).values()) if isinstance(part, Context)]


class Decoder:
    """A model and a cache with `context` tokens in it."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        context: int,
        tokens: int,
        seed: int,
        *,
        static: bool = False,
        compiled: bool = False,
    ):
        self.model, self.context, self.tokens = model, context, tokens
        self.call: Any = torch.compile(model) if compiled else model
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.cache: Any = DynamicCache(config=model.config)
        if static or compiled:
            self.cache = StaticCache(model.config, max_cache_len=context + tokens)
        self.mask = torch.ones(batch, context + tokens, dtype=torch.long, device=model.device)
        vocabulary = model.config.get_text_config().vocab_size
        shape = (batch, min(PROMPT, context - 1))
        prompt = torch.randint(vocabulary, shape, generator=self.generator, device=model.device)
        self.token = prompt[:, :1]
        self._forward(model, prompt, self.mask[:, : shape[1]])
        for layer in self.cache.layers:
            self._lengthen(layer, context - 1 - shape[1])
        self.start = [(layer.keys, layer.values) for layer in self.cache.layers]

    def prepare(self) -> None:
        """Cut the cache back and run one step, after which it holds `context` tokens."""
        for layer, (keys, values) in zip(self.cache.layers, self.start, strict=True):
            layer.keys, layer.values = keys, values
            if isinstance(layer, RecurrentLayer):
                layer.seen = self.context - 1
                for held in _contexts(layer.state):
                    held.rewind(self.context - 1)
            elif isinstance(layer, StaticLayer):
                layer.cumulative_length.fill_(self.context - 1)  # type: ignore[attr-defined]
            elif isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = self.context - 1
        self.length = self.context - 1
        self.step()

    def run(self) -> None:
        for _ in range(self.tokens):
            self.step()

    def step(self) -> None:
        self.length += 1
        self._forward(self.call, self.token, self.mask[:, : self.length])

    @torch.no_grad()
    def _forward(self, model: Callable[..., Any], tokens: Tensor, mask: Tensor) -> None:
        model(input_ids=tokens, attention_mask=mask, past_key_values=self.cache, use_cache=True)

    def _lengthen(self, layer: Any, more: int) -> None:
        """Append random keys and values to those of the prompt; a state that holds all keys gets only random ones."""
        if isinstance(layer, RecurrentLayer):
            for held in _contexts(layer.state):
                held.reset()
                shapes = ((*x.shape[:2], self.context - 1, x.shape[3]) for x in (held.keys, held.values))
                k, v = (torch.randn(shape, generator=self.generator, device=self.model.device) for shape in shapes)
                with torch.no_grad():
                    held.copy_(held.extended(k, v, None)[0])
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer):
            new = (x.new_empty(*x.shape[:2], more, x.shape[3]) for x in (layer.keys, layer.values))
            layer.update(*(x.normal_(generator=self.generator) for x in new))
        else:
            raise ValueError(
                f"bench decode does not support {type(self.model).__name__}, whose cache has a {type(layer).__name__}."
            )


def cache_bytes(cache: Any) -> int:
    """Size of the tensors of a cache in bytes."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            total += layer.nbytes()
        else:
            total += sum(tensor.untyped_storage().nbytes() for tensor in (layer.keys, layer.values))
    return total
