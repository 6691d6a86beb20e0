"""`extend_positions`: longer inputs for models with a learned position table (BERT has 512 positions, GPT-2 1,024).

Tables are recognised by their names and by the limit in the config. Buffers of the same length are extended as the
model would fill them. Models that also have relative positions are refused.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .discovery import nested_configs, outermost_models, owner_of, transformers_models

M = TypeVar("M", bound=nn.Module)
Method = Literal["tile", "interpolate"]

LIMIT = "max_position_embeddings"  # configs with another name (n_positions) map this one to theirs
CUT = "max_seq_length"  # truncation length of a SentenceTransformer

_TABLE = re.compile(r"wpe|embed_positions|positions?_embed(ding)?s?|pos_embed(ding)?s?")
_RELATIVE = re.compile(r"\brel_|relative")

# Contents of the buffers that are as long as the longest input, by name and shape.
_BUFFERS: dict[str, Callable[[torch.Size], Tensor]] = {
    "position_ids": lambda shape: torch.arange(shape[-1]).expand(shape),
    "token_type_ids": torch.zeros,
    "bias": lambda shape: torch.ones(shape, dtype=torch.bool).tril(),  # the causal mask of gpt_bigcode and older models
}


@dataclass(frozen=True)
class _Table:
    """A position table, and the limit in its config when it was found."""

    name: str
    embedding: nn.Embedding
    owner: PreTrainedModel
    config: PreTrainedConfig
    limit: int

    @property
    def learned(self) -> bool:
        return "Sinusoid" not in type(self.embedding).__name__

    @property
    def first(self) -> int:
        """Row of the first token. Some tables have rows before it that the config does not count (opt, bart); others
        number positions from the padding index (roberta).
        """
        padding = self.embedding.padding_idx
        uncounted = self.embedding.num_embeddings - self.limit
        return uncounted or (0 if padding is None or not self.learned else padding + 1)

    @property
    def length(self) -> int:
        """Number of tokens that the table allows."""
        return self.embedding.num_embeddings - self.first


def extend_positions(model: M, max_length: int, method: Method = "tile", *, tokenizer: Any = None) -> M:
    """Extend the learned position table of a model to `max_length` tokens, in place, and return the model.

    `method`: "tile" repeats the table, so outputs for inputs of the old length do not change; "interpolate" stretches
    it linearly, so the first and last positions keep their embeddings. Train the model after either. `tokenizer`: if
    given, its `model_max_length` is updated too. The `max_seq_length` of a SentenceTransformer is always updated.

    Configs are updated, so the model can be saved and loaded, patched or not. Create optimizers afterwards: the tables
    are new parameters.

    Raises ValueError for models with rotary, relative or sinusoidal positions; the message says what to do instead. If
    an error is raised, the model is unchanged.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64))
    >>> extend_positions(model, 256).config.n_positions
    256
    """
    if type(max_length) is not int or max_length < 1:
        raise ValueError(f"max_length must be a positive integer, not {max_length!r}.")
    if method not in get_args(Method):
        raise ValueError(f"Unknown method {method!r}; choose one of {', '.join(get_args(Method))}.")
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise ValueError(f"tokenizer must be a tokenizer of transformers; {tokenizer!r} has no model_max_length.")
    tables = [table for table in find_tables(model) if table.learned]
    if not tables:
        raise ValueError(_what_else(model, max_length))
    for table in tables:
        _check(table, max_length)
    weights: dict[Tensor, nn.Parameter] = {}  # tables that share a weight continue to share it
    for table in tables:
        old = table.embedding.weight
        if old not in weights:
            rows = _extended(old.detach()[table.first :], max_length, method)
            weights[old] = nn.Parameter(torch.cat([old.detach()[: table.first], rows]), requires_grad=old.requires_grad)
    configs = [c for root in transformers_models(model).values() for c in nested_configs(root.config)]
    for table in tables:
        _grow(table, max_length - table.length, weights[table.embedding.weight], configs)
    if tokenizer is not None:
        tokenizer.model_max_length = max_length
    if isinstance(getattr(model, CUT, None), int):
        setattr(model, CUT, max_length)
    return model


def find_tables(model: nn.Module) -> list[_Table]:
    """Find all position tables, learned and sinusoidal, whose number of rows is limited by a config."""
    owners, tables = transformers_models(model), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _TABLE.fullmatch(name.rpartition(".")[2]):
            owner = owner_of(name, owners)
            config = owner.config if hasattr(owner.config, LIMIT) else owner.config.get_text_config()
            limit = getattr(config, LIMIT, None)
            if type(limit) is int and 0 <= module.num_embeddings - limit <= 2:
                tables.append(_Table(name, module, owner, config, limit))
    return tables


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that the learned positions of a model allow, or None if it has no such table.

    >>> from transformers import RobertaConfig, RobertaModel
    >>> learned_positions(RobertaModel(RobertaConfig(hidden_size=12, num_hidden_layers=1, max_position_embeddings=66)))
    64
    """
    return min((table.length for table in find_tables(model) if table.learned), default=None)


def _check(table: _Table, max_length: int) -> None:
    """Raise ValueError if the table cannot be extended to `max_length`."""
    kind, rows = type(table.owner).__name__, table.embedding.weight.shape[0]
    relative = next((n for n, _ in table.owner.named_parameters() if _RELATIVE.search(n)), None)
    if relative is not None:
        raise ValueError(f"{kind} cannot be extended: it also has relative positions ({relative}).")
    if table.embedding.weight.is_meta:
        raise ValueError(f"{table.name} is on the meta device, so it has no values. Load the weights first.")
    if rows != table.embedding.num_embeddings:
        raise ValueError(
            f"{table.name} has {rows} rows where config.{LIMIT}={table.limit}. Extend the model before it is wrapped "
            "or sharded, and with the config it was created from."
        )
    for path, name, buffer in _buffers(table):
        if not torch.equal(_BUFFERS[name](buffer.shape).to(buffer), buffer):
            raise ValueError(f"{kind} cannot be extended: it has a buffer {path} with unknown contents.")
    if max_length < table.length:
        raise ValueError(
            f"{kind} already has positions for {table.length} tokens; max_length={max_length} would shorten its table."
        )


def _buffers(table: _Table) -> Iterator[tuple[str, str, Tensor]]:
    for path, buffer in table.owner.named_buffers():
        name = path.rpartition(".")[2]
        if name in _BUFFERS and table.limit in buffer.shape:
            yield path, name, buffer


def _grow(table: _Table, more: int, weight: nn.Parameter, configs: list[PreTrainedConfig]) -> None:
    limit = table.limit
    for path, name, buffer in list(_buffers(table)):
        shape = [size + more if size == limit else size for size in buffer.shape]
        longer = _BUFFERS[name](torch.Size(shape)).to(buffer).contiguous()
        table.owner.get_submodule(path.rpartition(".")[0])._buffers[name] = longer  # keeps it persistent or not
    table.embedding.weight, table.embedding.num_embeddings = weight, len(weight)
    for module in table.owner.modules():
        for name, value in list(vars(module).items()):
            if "position" in name and type(value) is int and value == limit:
                setattr(module, name, limit + more)
    for config in configs:  # a nested model may have its own copy of the config
        if type(config) is type(table.config) and getattr(config, LIMIT) == limit:
            setattr(config, LIMIT, limit + more)
            if getattr(config, "n_ctx", None) == limit:  # configs of gpt2 have the limit twice
                config.n_ctx = limit + more


def _extended(rows: Tensor, length: int, method: Method) -> Tensor:
    """Return `length` rows: the given ones repeated, or interpolated between the first and the last."""
    if method == "tile":
        return rows[torch.arange(length, device=rows.device) % len(rows)]
    stretched = nn.functional.interpolate(rows.T[None].double(), length, mode="linear", align_corners=True)
    return stretched[0].T.to(rows)


def _what_else(model: nn.Module, max_length: int) -> str:
    """The error message for a model without a learned table: what to do instead."""
    root = outermost_models(model)[0]
    kind, now = type(root).__name__, getattr(root.config.get_text_config(), LIMIT, None)
    if any("Rotary" in type(m).__name__ for m in model.modules()):
        return (
            f"{kind} has rotary embeddings, so there is no position table to extend. Set the length in its config: "
            f"from_pretrained(..., {LIMIT}={max_length}), with a scaling such as rope_parameters={{'rope_type': "
            f"'yarn', 'factor': {max_length / now if now else 4.0:g}, 'rope_theta': ..., 'original_{LIMIT}': {now}}}."
        )
    return (
        f"{kind} has no learned absolute positions limited by config.{LIMIT}, so there is nothing to extend. Models "
        "with relative positions (t5, bloom) or convolutions accept longer inputs as they are; some models with "
        f"sinusoidal positions have model.resize_position_embeddings({max_length}); positions of images follow from "
        "the image size. If PEFT has wrapped the table (modules_to_save), extend the model before that."
    )
