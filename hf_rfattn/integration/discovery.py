"""Finds the attention modules of a model, and the reasons why some of them cannot be patched."""

import ast
import functools
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# Attention between two sequences, by the name of the module and by that of its class.
_CROSS = re.compile(r"cross|encoder_attn|encoder_decoder|EncDec|x_attn|token_to_image|image_to_token")
_CROSS_CLASS = re.compile(r"Cross|Perceiver|Resampler")

# Patterns in the source of an attention class for changes of the scores that φ(x)ᵀφ(y) cannot express.
_SOURCE_REFUSALS = (
    (re.compile(r"relative|rel_pos|position_bias"), "it adds a relative position bias to its scores"),
    (re.compile(r"\bs_aux\b|\bsinks\b"), "it has attention sinks, a score that belongs to no key"),
    (
        re.compile(r"index_mask|dynamic_mask|build_block_mask|topk|selected_token"),
        "it selects the keys that each query sees",
    ),
)

# The attention mask of a patched model is not an L × L matrix (see attention.py). Other modules that read it would
# misread it without an error, and models that build their own L × L masks build some that cannot be expressed.
_READS_MASK = re.compile(r"(scores|weights) \+ attention_mask|attn_mask_penalty")
_MAKES_MASK = re.compile(
    r"\b(generate_block_attention_mask|_prepare_aspect_ratio_attention_mask|_make_causal_mask|attn_mask_probs)\b|"
    r"self\._prepare_4d_attention_mask"
)
# Models that overlay the causal mask so that the tokens of an image, of a prefix, or all tokens see each other.
_OVERLAYS_MASK = re.compile(r"block_sequence_ids|or_mask_function")


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model."""

    name: str  # path in the model
    module: nn.Module
    owner: PreTrainedModel  # the innermost model it belongs to
    index: int  # layer number within its stack
    ordinal: int  # number among the attention modules of all models that share its owner's config
    cross: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    refusal: str | None  # why it cannot be patched


def find_attention(model: nn.Module) -> list[AttentionSite]:
    """Return all modules of `model` that use transformers' attention interface, in order.

    Raises ValueError for a model that has none.
    """
    owners = transformers_models(model)
    found = [(n, m) for n, m in model.named_modules() if uses_interface(type(m)) and hasattr(m, "config")]
    if not found:
        name = type(next(iter(owners.values()))).__name__
        raise ValueError(
            f"{name} cannot be patched: its attention does not go through transformers' attention interface "
            "(deberta, bloom, gptj, falcon and some others have their own attention code)."
        )
    reasons = _model_refusals(model, owners)
    counts: Counter[int] = Counter()  # by config, since each tower of a model is restored on its own
    sites = []
    for name, module in found:
        owner = owner_of(name, owners)
        sites.append(_site(name, module, owner, counts[id(owner.config)], reasons.get(id(owner.config))))
        counts[id(owner.config)] += 1
    return sites


def transformers_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Return all transformers models in a model, itself included, by path, outer ones first.

    Raises ValueError if there are none.
    """
    if isinstance(model, str | os.PathLike):
        raise ValueError(
            f"{str(model)!r} is a name, not a model. Load it first: AutoModel.from_pretrained({str(model)!r})."
        )
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    owners = {name: m for name, m in modules if isinstance(m, PreTrainedModel)}
    if not owners:
        raise ValueError(f"{type(model).__name__} holds no transformers model; pass a PreTrainedModel.")
    return owners


def outermost_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return the transformers models in a model that are not nested in another one."""
    found = transformers_models(model).values()
    inside = {id(part) for m in found for part in m.modules() if part is not m}
    return [m for m in found if id(m) not in inside]


def owner_of(name: str, owners: dict[str, PreTrainedModel]) -> PreTrainedModel:
    """Return the innermost transformers model that contains the module with this path."""
    while name and name not in owners:
        name = name.rpartition(".")[0]
    return owners[name] if name in owners else next(iter(owners.values()))


def _model_refusals(model: nn.Module, owners: dict[str, PreTrainedModel]) -> dict[int, str]:
    """Reasons, outside of the attention modules, why no attention of a (nested) model can be patched.

    Keyed by the id of the config, which decides the kind of mask and which an encoder shares with its decoder.
    """
    reasons: dict[int, str] = {}
    for name, module in model.named_modules():
        cls, source = type(module), _source(type(module))
        owner = owner_of(name, owners)
        config = owner.config
        if module is owner and _MAKES_MASK.search(source):
            reason = f"its model builds its own L × L attention mask ({cls.__name__})"
        elif module is owner and _overlays_mask(owner.config.get_text_config(), source):
            config = owner.config.get_text_config()
            reason = f"its model lets some tokens see later ones, with an L × L mask ({cls.__name__})"
        elif module is not owner and not uses_interface(cls) and _READS_MASK.search(source):
            reason = f"another module of its model reads the attention mask ({cls.__name__})"
        elif cls.__name__.endswith("RelativePositionBias"):  # beit, if enabled in the config
            reason = "it adds a relative position bias to its scores"
        else:
            continue
        reasons[id(config)] = reason
    return reasons


def _overlays_mask(config: Any, source: str) -> bool:
    """Whether a model with this source and text config overlays its causal mask."""
    found = _OVERLAYS_MASK.search(source)
    if found is None:
        return False
    asked = getattr(config, "use_bidirectional_attention", None)
    if 'use_bidirectional_attention == "vision"' in source:  # gemma4
        return asked == "vision"
    return found[0] == "block_sequence_ids" or bool(asked)


def _site(name: str, module: nn.Module, owner: PreTrainedModel, ordinal: int, refusal: str | None) -> AttentionSite:
    parts = name.split(".")
    # Without the last part, which numbers the two attention modules of a layer in longcat_flash.
    numbers = [int(part) for part in parts[:-1] if part.isdigit()]
    heads, kv_heads, head_dim = _shape(module)
    refusal = _refusal(module) or refusal
    if refusal is None and not (heads and kv_heads and head_dim):
        refusal = "its number of heads and head size could not be found"
    # Cross-attention by name, or because there are fewer keys than queries (segformer).
    named = any(_CROSS.search(part) for part in parts[-2:]) or _CROSS_CLASS.search(type(module).__name__)
    cross = bool(named) or getattr(module, "sequence_reduction_ratio", 1) > 1
    index = numbers[-1] if numbers else 0
    return AttentionSite(name, module, owner, index, ordinal, cross, heads, kv_heads, head_dim, refusal)


def nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a config and all configs nested in it."""
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from nested_configs(inner)


def uses_interface(cls: type) -> bool:
    """Whether a module class computes attention through `ALL_ATTENTION_FUNCTIONS`."""
    return "ALL_ATTENTION_FUNCTIONS" in _source(cls)


def _source(cls: type) -> str:
    """Source of the class that defines the forward of `cls`; empty for modules of torch."""
    base = next((base for base in cls.__mro__ if "forward" in vars(base)), None)
    if base is None or base.__module__.startswith("torch."):
        return ""
    return _class_sources(base.__module__).get(base.__name__, "")


@functools.cache
def _class_sources(module: str) -> dict[str, str]:
    """Source of every class of a module, by name. `inspect.getsource` would parse the file once per class."""
    try:
        source = inspect.getsource(sys.modules[module])
        tree = ast.parse(source)
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    lines = source.splitlines(keepends=True)
    sources = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            sources[node.name] = "".join(lines[start - 1 : node.end_lineno])
    return sources


def _layer_config(module: nn.Module) -> Any:
    """The config of one layer. If layers differ (gemma4), reading their sizes from the whole config raises."""
    config, index = module.config, getattr(module, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False) and isinstance(index, int):
        return config.per_layer_config[index]  # type: ignore[union-attr, index]
    return config


def _shape(module: nn.Module) -> tuple[int, int, int]:
    """(query heads, key heads, head size) from the attributes of an attention module or its config; 0 if unknown."""

    def first(*names: str) -> int:
        for holder in (module, _layer_config(module)):
            for name in names:
                value = getattr(holder, name, None)
                if type(value) is int and value > 0:
                    return value
        return 0

    heads = first("num_heads", "num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
    head_dim = first("head_dim", "attention_head_size", "head_size", "qk_head_dim", "key_value_proj_dim")
    if heads and not head_dim:
        head_dim = first("embed_dim", "hidden_size", "d_model", "dim", "n_embd") // heads
    groups, own = (getattr(module, name, None) for name in ("num_key_value_groups", "num_key_value_heads"))
    if type(groups) is int and groups > 0:
        return heads, heads // groups, head_dim
    return heads, own if type(own) is int and own > 0 else heads, head_dim


def _refusal(module: nn.Module) -> str | None:
    source = _source(type(module))
    for pattern, reason in _SOURCE_REFUSALS:
        if pattern.search(source):
            return reason
    if any("softcap" in name and value is not None for name, value in vars(module).items()):
        return "it caps its scores (softcap)"
    window = _window(module, source)
    if window is not None:
        return f"it sees a window of {window} tokens only, so its cost is already linear"
    return None


def _window(module: nn.Module, source: str) -> int | str | None:
    """The sliding window of a layer, or None if it has none."""
    config = _layer_config(module)
    layer_types = getattr(config, "layer_types", None)
    layer_idx = getattr(module, "layer_idx", None)
    if isinstance(layer_types, (list, tuple)) and isinstance(layer_idx, int) and layer_idx < len(layer_types):
        if layer_types[layer_idx] == "full_attention":
            return None
        if "sliding" in layer_types[layer_idx] or "chunked" in layer_types[layer_idx]:
            return getattr(config, "sliding_window", None) or "some"
    if "sliding_window" not in source:
        return None
    if "sliding_window" in vars(module):
        return module.sliding_window  # type: ignore[return-value]
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return getattr(config, "sliding_window", None)
