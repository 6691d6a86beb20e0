"""The attention function registered with transformers: q, k, v in, the layer's mechanism (or softmax) applied, output
out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import RecurrentLayer
from .masks import Pattern, dense_mask, hides_nothing, is_compact, read_pattern, rf_mask
from .names import CACHE, NAME

# Arguments by which some models change their scores in ways φ(x)ᵀφ(y) cannot express.
_INEXPRESSIBLE = {
    "position_bias": "adds a position bias to its scores",
    "s_aux": "has attention sinks",
    "softcap": "caps its scores",
    "sliding_window": "sees a sliding window only",
    "indices": "selects keys",
    "block_indices": "selects keys",
}

_HIDDEN = -1000.0  # exp of it is 0 in any precision; masks in use have -10000 (-9984 in bfloat16) or far less
_BIAS = (
    "The floating attention mask has values other than 0 (visible) and -1000 or below (hidden). Linear attention can "
    "hide keys but cannot add a bias to their scores: pass a boolean or 2D attention_mask, or leave these layers "
    "softmax with patch_model(model, ..., layers=...)."
)


def rf_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: `[B, H, L, D]` in, `[B, L, H, D]` out.

    Layers without a mechanism in a patched model get exact softmax. Dropout of attention weights has no counterpart in
    linear attention and is applied only there.
    """
    cache_layer = kwargs.pop(CACHE, None)
    mechanism = getattr(module, "rf", None)
    if mechanism is None:
        _check_patched(module)
        return _softmax(module, query, key, value, attention_mask, dropout, scaling, cache_layer, kwargs)
    for name, reason in _INEXPRESSIBLE.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} {reason} ({name}), which its {mechanism.config.name!r} attention cannot "
                "express. Leave this layer out: patch_model(model, ..., layers=...)."
            )
    if isinstance(cache_layer, RecurrentLayer):
        past_mask = _past_mask(module, key, attention_mask, cache_layer)
        out = cache_layer.attend(mechanism, query, key, value, past_mask, scaling)
    else:
        pattern = _pattern(module, query, key, attention_mask, kwargs)
        out = mechanism(
            query,
            key,
            value,
            key_mask=pattern.key_mask,
            causal=pattern.causal,
            segments=pattern.segments,
            scale=scaling,
        )
    return out.transpose(1, 2).contiguous(), None


def _pattern(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Pattern:
    batch, _, k_length, _ = key.shape
    if is_compact(mask):
        return read_pattern(mask, batch, k_length)  # type: ignore[arg-type]
    if mask is None:  # the same rule as transformers' sdpa function
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return Pattern(None, None, bool(causal) and query.shape[2] > 1)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
        raise NotImplementedError(
            f"{type(module).__name__} was given a {mask.dtype} attention mask of shape {tuple(mask.shape)}. Linear "
            "attention can hide keys (a 2D padding mask), keep causality and keep packed sequences apart (position_ids "
            "that restart), but cannot express an arbitrary mask of pairs. Pass a 2D attention_mask, or leave this "
            "layer softmax: patch_model(model, ..., layers=...)."
        )
    if hides_nothing(mask, k_length):
        return Pattern(None, None, False)
    row = mask[:, 0, 0, :k_length].expand(batch, -1)
    return Pattern(_visible(row) if mask.dtype.is_floating_point else row, None, False)


def _visible(bias: Tensor) -> Tensor:
    """Which keys a floating mask leaves visible. It is added to scores: 0 for keys that exist, and far below any score
    for others (layoutlm and markuplm make theirs themselves).
    """
    visible = bias == 0
    expressible = (visible | (bias <= _HIDDEN)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(expressible, _BIAS)
    elif not expressible:
        raise NotImplementedError(_BIAS)
    return visible


def _past_mask(module: nn.Module, key: Tensor, mask: Tensor | None, layer: RecurrentLayer) -> Tensor | None:
    """The padding of all tokens so far, in generation, as it came: only that of the new ones will be looked at."""
    if mask is None:
        return None
    if not is_compact(mask) or mask.dtype != torch.int8:
        raise NotImplementedError(
            f"{type(module).__name__} generates with a {mask.dtype} mask of shape {tuple(mask.shape)}; "
            "a recurrent state needs a 2D attention_mask."
        )
    length = layer.seen + key.shape[2] if layer.static_length is None else layer.static_length
    return None if hides_nothing(mask, length) else mask[:, 0, -1].expand(key.shape[0], -1)  # type: ignore[arg-type]


def _softmax(module, query, key, value, mask, dropout, scaling, cache_layer, kwargs) -> tuple[Tensor, None]:
    if is_compact(mask):
        pattern = read_pattern(mask, query.shape[0], key.shape[2])
        start = None  # position of the first query, where it is not the end of the keys that tells
        if isinstance(cache_layer, StaticLayer):
            start = cache_layer.get_seq_length() - query.shape[2]
        mask = dense_mask(pattern, query.shape[2], key.shape[2], query.device, start)
        kwargs = {**kwargs, "is_causal": True}
    elif mask is not None and hides_nothing(mask, key.shape[2]):
        mask, kwargs = None, {**kwargs, "is_causal": False}
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


def _check_patched(module: nn.Module) -> None:
    if "rf" not in vars(module):  # patch_model sets it to None where it leaves a layer softmax
        raise ValueError(
            f"The attention implementation is {NAME!r} but this model was not patched, so {type(module).__name__} has "
            "no mechanism. Call hf_rfattn.patch_model(model, 'favor+'), or set attn_implementation='sdpa'."
        )


def register() -> None:
    """Tell transformers of both functions."""
    AttentionInterface.register(NAME, rf_attention_forward)
    AttentionMaskInterface.register(NAME, rf_mask)
