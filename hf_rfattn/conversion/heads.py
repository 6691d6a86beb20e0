"""`keep_exact_heads`: gives the heads that a linear mechanism approximates worst their exact softmax back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..integration import AttentionError, attention_error
from ..integration.discovery import find_attention
from ..integration.error import mechanism_sites
from ..integration.inputs import Data
from ..integration.names import SPEC
from ..integration.patching import apply_patch
from ..integration.spec import PatchSpec
from ..mechanisms.exact_heads import ExactHeadsAttention, ExactHeadsConfig

Heads = dict[int, tuple[int, ...]]  # by layer number


def keep_exact_heads(
    model: nn.Module,
    batch: Data,
    share: float = 1 / 4,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 16,
    max_length: int = 512,
) -> AttentionError:
    """Give the heads with the largest error exact softmax again, in place, and return the error before.

    `model`: a model patched with linear mechanisms, usually after `convert`; what they have learned is kept. `batch`
    and further arguments: as in `attention_error`. `share`: fraction of all heads that become exact. Their cost is
    quadratic, and generation caches their keys and values.

    >>> import torch
    >>> from hf_rfattn import patch_model
    >>> from transformers import BertConfig, BertModel
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    >>> model = patch_model(BertModel(tiny), "hedgehog")
    >>> error = keep_exact_heads(model, {"input_ids": torch.arange(16)[None]}, share=1 / 8)
    >>> sorted(layer.attention.self.rf.config.name for layer in model.encoder.layer)
    ['exact_heads', 'hedgehog']
    """
    error = attention_error(model, batch, tokenizer, batch_size=batch_size, max_length=max_length)
    set_exact_heads(model, worst_heads(model, error, share))
    return error


def worst_heads(model: nn.Module, error: AttentionError, share: float) -> Heads:
    """Choose the heads with the largest error, at least one."""
    if not 0 < share < 1:
        raise ValueError(f"The share of exact heads must be between 0 and 1, not {share!r}.")
    layers = {site.name: site.index for site in find_attention(model)}
    ranked = sorted(
        ((value, layers[name], head) for name, heads in zip(error.layers, error.heads, strict=True)
         for head, value in enumerate(heads)),
        reverse=True,
    )  # fmt: skip
    chosen: dict[int, set[int]] = {}
    for _, layer, head in ranked[: max(1, round(share * len(ranked)))]:
        chosen.setdefault(layer, set()).add(head)
    return {layer: tuple(sorted(heads)) for layer, heads in sorted(chosen.items())}


def set_exact_heads(model: nn.Module, heads: Mapping[int, tuple[int, ...]]) -> None:
    """Let these heads of a patched model use exact softmax. The mechanisms stay the same modules."""
    sites = find_attention(model)
    mechanisms = {name: mechanism for mechanism, name in mechanism_sites(model).items()}
    document: Any = next(getattr(s.module.config, SPEC) for s in sites if hasattr(s.module.config, SPEC))
    spec = PatchSpec.from_dict(document)
    if any(isinstance(config, ExactHeadsConfig) for config in spec.by_layer.values()):
        raise ValueError("Some heads of this model are exact already. Convert the original model with another share.")
    layers = {
        number: ExactHeadsConfig(heads=heads[number], rest=config) if number in heads else config
        for number, config in spec.by_layer.items()
    }
    apply_patch(model, sites, replace(spec, by_layer=layers))
    for site in sites:
        if site.name in mechanisms:
            new, old = site.module.rf, mechanisms[site.name]
            if isinstance(new, ExactHeadsAttention):
                new.rest = old  # type: ignore[assignment]
            else:
                site.module.rf = old
