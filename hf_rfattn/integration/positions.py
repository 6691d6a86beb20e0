"""`extend_positions`: longer inputs for models whose positions are a learned table (BERT stops at 512, GPT-2 at 1,024).

No architecture is named here. A model is made once more without weights, on the meta device, with a config that allows
one position more; what that has made longer is what has to be extended. Tables get rows from the rows they have,
buffers what they would hold had they been made longer, and anything else that has grown is a reason to refuse.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .discovery import outermost_models
from .inputs import Data, as_batches, texts_in

M = TypeVar("M", bound=nn.Module)
Method = Literal["tile", "interpolate"]

LIMIT = "max_position_embeddings"  # configs that call it otherwise (n_positions) map this name to theirs
CUT = "max_seq_length"  # where a SentenceTransformer truncates texts

# What buffers hold that are as long as the longest input, by name and shape.
_BUFFERS: dict[str, Callable[[torch.Size], Tensor]] = {
    "position_ids": lambda shape: torch.arange(shape[-1]).expand(shape),
    "token_type_ids": torch.zeros,
    "bias": lambda shape: torch.ones(shape, dtype=torch.bool).tril(),  # the causal mask of gpt_bigcode and older models
}


def extend_positions(model: M, max_length: int | Data, method: Method = "tile", *, tokenizer: Any = None) -> M:
    """Let a model with learned absolute positions take inputs of `max_length` tokens, in place, and return it.

    `max_length`: a number, or the inputs themselves, of which the longest counts: texts, one or several, with their
    `tokenizer`, or what a tokenizer returned, once or several times. If they fit already, nothing changes.
    `method`: "tile" repeats the learned table, so that inputs of the old length give what they gave; "interpolate"
    stretches it linearly over the new length, so that its first and last positions stay what they were. Train the
    model after either. `tokenizer`: its limit is set too. A SentenceTransformer truncates texts at the new length.

    Configs are changed with the model, so that it is saved and loaded as it is, patched or not. Make optimizers
    afterwards: the tables are new parameters.

    Models with rotary, relative or computed positions raise ValueError, which says what to do instead. Any error
    leaves the model as it was.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64))
    >>> extend_positions(model, 256).config.n_positions
    256
    """
    if isinstance(max_length, Iterable):
        max_length = max(_longest(max_length, tokenizer), learned_positions(model) or 0)
    if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
        raise ValueError(
            f"max_length must be a positive whole number of tokens, or the inputs that must fit, not {max_length!r}."
        )
    if method not in get_args(Method):
        raise ValueError(f"Unknown method {method!r}; choose one of {', '.join(get_args(Method))}.")
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise ValueError(f"tokenizer must have a model_max_length, as those of transformers; {tokenizer!r} has none.")
    growths = _find_growths(model)
    if not any(growth.tables for growth in growths):
        _refuse(model, max_length)
    for growth in growths:
        _check(growth, max_length)
    if not growths:
        raise ValueError(
            f"{type(outermost_models(model)[0]).__name__} has no learned absolute positions of tokens that "
            f"config.{LIMIT} limits; there is nothing to extend. Relative positions (t5, bloom) and convolutions take "
            "longer inputs as they are; those of images follow from the size of the image."
        )
    weights: dict[Tensor, nn.Parameter] = {}  # tables that share their weight go on sharing it
    for growth in growths:
        _grow(growth, max_length, method, weights)
    if tokenizer is not None:
        tokenizer.model_max_length = max_length
    if isinstance(getattr(model, CUT, None), int):
        setattr(model, CUT, max_length)
    return model


def _longest(data: Data, tokenizer: Any) -> int:
    """Tokens of the longest input in texts or batches."""
    if isinstance(data, str) or (isinstance(data, Sequence) and len(data) and isinstance(data[0], str)):
        return max(len(ids) for ids in tokenizer(texts_in(data, tokenizer))["input_ids"])
    return max((batch["input_ids"].shape[-1] for batch in as_batches(data)), default=0)


def learned_positions(model: nn.Module) -> int | None:
    """How many tokens the learned positions of a model allow; None if it has none that can be extended.

    >>> from transformers import RobertaConfig, RobertaModel
    >>> learned_positions(RobertaModel(RobertaConfig(hidden_size=12, num_hidden_layers=1, max_position_embeddings=66)))
    64
    """
    return min((growth.length for growth in _find_growths(model) if growth.tables), default=None)


def table_length(model: PreTrainedModel, limit: int) -> int | None:
    """Tokens that the tables of positions allow, learned or not; None if there are none."""
    try:
        growths = _find_growths(model)
    except ValueError:
        return None
    return min((growth.length if growth.tables else limit for growth in growths), default=None)


@dataclass
class _Growth:
    """What a model makes longer when one of its configs allows one position more."""

    model: PreTrainedModel
    config: PreTrainedConfig  # that of the model, or one nested in it
    tables: dict[str, nn.Embedding] = field(default_factory=dict)
    buffers: dict[str, list[int]] = field(default_factory=dict)  # by name, the dimensions that grow
    numbers: list[tuple[nn.Module, str]] = field(default_factory=list)  # attributes of modules
    others: list[str] = field(default_factory=list)  # parameters that are no table of positions

    @property
    def length(self) -> int:
        """How many tokens its tables allow."""
        return min(table.num_embeddings - self.first(table) for table in self.tables.values())

    def first(self, table: nn.Embedding) -> int:
        """The row of the first token. Some tables have rows before it that the config does not count (opt, bart);
        others count their positions from the padding index (roberta).
        """
        uncounted = table.num_embeddings - getattr(self.config, LIMIT)
        return uncounted or (0 if table.padding_idx is None else table.padding_idx + 1)


def _find_growths(model: nn.Module) -> list[_Growth]:
    """One for each config of each outermost transformers model that limits some of its parameters."""
    growths = []
    for root in outermost_models(model):
        configs = list(_nested(root.config))
        limited = [i for i, c in enumerate(configs) if type(getattr(c, LIMIT, None)) is int and getattr(c, LIMIT) > 0]
        for number in limited:
            growth = _compare(root, configs[number], _without_weights(root), _without_weights(root, longer=number))
            if growth.tables or growth.others:
                growths.append(growth)
    return growths


def _nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config and all those inside it, in an order of their own."""
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from _nested(inner)


def _without_weights(model: PreTrainedModel, longer: int | None = None) -> PreTrainedModel:
    """The model as its config makes it, on the meta device; with one position more in config number `longer`."""
    config = copy.deepcopy(model.config)
    if longer is not None:
        changed = list(_nested(config))[longer]
        setattr(changed, LIMIT, getattr(changed, LIMIT) + 1)
    try:
        with torch.device("meta"):
            return type(model)(config)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be extended: it could not be made again from its config alone ({error})."
        ) from error


def _compare(
    model: PreTrainedModel, config: PreTrainedConfig, same: PreTrainedModel, longer: PreTrainedModel
) -> _Growth:
    growth = _Growth(model, config)
    ours, before = dict(model.named_modules()), dict(same.named_modules())
    for path, new in longer.named_modules():
        old, own = before.get(path), ours.get(path)
        if old is None or own is None:
            continue
        for name, tensor in new.named_parameters(recurse=False):
            shape = old.get_parameter(name).shape
            if tensor.shape != shape:
                learned = isinstance(own, nn.Embedding) and "Sinusoid" not in type(own).__name__
                if learned and tensor.shape == (shape[0] + 1, shape[1]):
                    growth.tables[path] = own
                else:
                    growth.others.append(f"{path}.{name}")
        for name, tensor in new.named_buffers(recurse=False):
            grown = [i for i, size in enumerate(old.get_buffer(name).shape) if tensor.shape[i] != size]
            if grown:
                growth.buffers[f"{path}.{name}".lstrip(".")] = grown
        for name, number in vars(new).items():
            known = (vars(old).get(name), vars(own).get(name))
            if type(number) is int and all(type(n) is int and n + 1 == number for n in known):
                growth.numbers.append((own, name))
    return growth


def _check(growth: _Growth, max_length: int) -> None:
    """Raise for all that cannot be done."""
    kind, limit = type(growth.model).__name__, getattr(growth.config, LIMIT)
    if growth.others:
        raise ValueError(
            f"{kind} cannot be extended: {growth.others[0]} grows with config.{LIMIT} and is no plain table of learned "
            "positions. If it is wrapped, as PEFT does with modules_to_save, extend the model before that."
        )
    for name, table in growth.tables.items():
        if table.weight.is_meta:
            raise ValueError(f"{name} is on the meta device, without values to extend. Load the weights first.")
        if table.weight.shape[0] != table.num_embeddings or not limit <= table.num_embeddings:
            raise ValueError(
                f"{name} has {table.weight.shape[0]} rows where config.{LIMIT}={limit}. Extend a model before it is "
                "wrapped or sharded, with the config it was made from."
            )
    for name in growth.buffers:
        buffer = growth.model.get_buffer(name)
        fill = _BUFFERS.get(name.rpartition(".")[2])
        if fill is None or not torch.equal(fill(buffer.shape).to(buffer), buffer):
            raise ValueError(f"{kind} cannot be extended: its buffer {name} is none that is known how to fill.")
    if max_length < growth.length:
        raise ValueError(
            f"{kind} has positions for {growth.length} tokens already; max_length={max_length} would take some away."
        )


def _grow(growth: _Growth, max_length: int, method: Method, weights: dict[Tensor, nn.Parameter]) -> None:
    more = max_length - growth.length
    for table in growth.tables.values():
        old, first = table.weight, growth.first(table)
        if old not in weights:
            rows = _extended(old.detach()[first:], more, method)
            weights[old] = nn.Parameter(torch.cat([old.detach()[:first], rows]), requires_grad=old.requires_grad)
    for table in growth.tables.values():
        table.weight = weights[table.weight]
    for path, grown in growth.buffers.items():
        buffer = growth.model.get_buffer(path)
        shape = [size + more if i in grown else size for i, size in enumerate(buffer.shape)]
        holder, _, name = path.rpartition(".")
        longer = _BUFFERS[name](torch.Size(shape)).to(buffer).contiguous()
        growth.model.get_submodule(holder)._buffers[name] = longer  # persistent or not, as it was
    for module, name in growth.numbers:
        setattr(module, name, getattr(module, name) + more)
    limit = getattr(growth.config, LIMIT)
    for config in _copies(growth):
        setattr(config, LIMIT, limit + more)
        if getattr(config, "n_ctx", None) == limit:  # gpt2 was published with the same number twice
            config.n_ctx = limit + more


def _extended(rows: Tensor, more: int, method: Method) -> Tensor:
    """`more` rows made from those there are: repeated, or all stretched evenly between the first and the last."""
    length = len(rows) + more
    if method == "tile":
        return rows[torch.arange(length, device=rows.device) % len(rows)]
    where = torch.linspace(0, len(rows) - 1, length, dtype=torch.float64)
    below = where.floor().long()
    above = (below + 1).clamp(max=len(rows) - 1)
    exact = torch.promote_types(rows.dtype, torch.float32)
    share = (where - below).to(rows.device, exact).unsqueeze(1)
    return torch.lerp(rows[below.to(rows.device)].to(exact), rows[above.to(rows.device)].to(exact), share).to(rows)


def _copies(growth: _Growth) -> list[PreTrainedConfig]:
    """The config that limits the tables, and copies of it that models inside the model may have."""
    limit, known = getattr(growth.config, LIMIT), {id(c) for c in _nested(growth.model.config)}
    found = [growth.config]
    for module in growth.model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in known:
            parts = {id(part) for part in module.modules()}
            if any(id(table) in parts for table in growth.tables.values()):
                same = (c for c in _nested(module.config) if type(c) is type(growth.config))
                found += [c for c in same if getattr(c, LIMIT) == limit]
    return found


def _refuse(model: nn.Module, max_length: int) -> None:
    """Raise for a model with computed positions, and say what to do instead."""
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    kind, configs = type(owners[0]).__name__, [c for m in owners for c in _nested(m.config)]
    classes = " ".join(type(m).__name__ for m in model.modules())
    if "Rotary" in classes or any(getattr(c, "rotary_dim", None) for c in configs):
        now = next((getattr(c, LIMIT) for c in configs if hasattr(c, LIMIT)), None)
        raise ValueError(
            f"{kind} has rotary embeddings, so there is no position table to extend. Its config extends them: "
            f"from_pretrained(..., {LIMIT}={max_length}), with a scaling such as rope_parameters={{'rope_type': "
            f"'yarn', 'factor': {max_length / now if now else 4.0:g}, 'rope_theta': ..., "
            f"'original_{LIMIT}': {now}}}."
        )
    if "Sinusoid" in classes:
        raise ValueError(
            f"{kind} has sinusoids as positions, which are computed for any length and not learned. Where its "
            f"architecture has it, model.resize_position_embeddings({max_length}) of transformers makes more of them."
        )
