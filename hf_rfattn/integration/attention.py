"""The attention function and the mask function that are registered with transformers.

The attention function applies the layer's mechanism, or softmax if the layer has none, to q, k and v. Padding, packing
and causality reach it in one small tensor: transformers calls the mask function once per forward pass and passes the
result to every layer. The mask function avoids L × L masks:
- bidirectional: a boolean mask with one row for all queries, `[B or 1, 1, 1, Lk]`, True for keys that are not padding;
- causal: a compact mask `[B or 1, 1, 2, Lk]`, recognised by its two rows and its integer type: int8 for padding
  (1 = not padding) or int32 for packing (the index of the key's sequence). transformers' exporters concatenate the
  masks of several steps row by row; the last row covers all keys;
- no key hidden: the same masks with a last dimension of 1;
- anything else (windows, overlays): an ordinary L × L mask for softmax layers; patched layers raise an error.
Models pass the mask on unchanged or slice its last dimension.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel, masking_utils
from transformers.cache_utils import StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.naive import allowed_pairs
from ..ops.sharded import Part
from .cache import RecurrentLayer
from .names import CACHE, NAME, PART
from .positions import LIMIT, find_tables

# Arguments with which some models change their scores in ways that φ(x)ᵀφ(y) cannot express.
_INEXPRESSIBLE = {
    "position_bias": "adds a position bias to its scores",
    "s_aux": "has attention sinks",
    "softcap": "caps its scores",
    "sliding_window": "sees a sliding window only",
    "indices": "selects keys",
    "block_indices": "selects keys",
}

_HIDDEN = -1000.0  # exp(-1000) is 0 in any precision; models use -10000 (-9984 in bfloat16) or far less
_BIAS = (
    "The floating attention mask has values other than 0 (visible) and -1000 or below (hidden). Linear attention can "
    "hide keys but cannot add a bias to their scores: pass a boolean or 2D attention_mask, or leave these layers "
    "softmax with patch_model(model, ..., layers=...)."
)


class CallCheck:
    """Forward pre-hook of a patched model that raises for unsupported arguments instead of ignoring them, and for
    inputs longer than the position table, which would end in an index error.
    """

    def __init__(self, positions: bool):
        """`positions`: whether to check positions, for models with patched layers outside of any nested model."""
        self.positions = positions
        self.limit: int | None = None  # limit in the config when the tables were last searched
        self.allowed: int | None = None  # number of tokens that the tables allow

    def __call__(self, module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
        if module.config._attn_implementation == NAME:
            if kwargs.get("output_attentions"):
                raise ValueError(
                    "output_attentions=True: linear attention has no L × L matrix of weights to return. Use "
                    "model.set_attn_implementation('eager') for softmax weights, or mechanism.attention_weights(q, k) "
                    "on one layer."
                )
            if kwargs.get("head_mask") is not None:
                raise ValueError("head_mask is not supported by patched models (transformers 5 itself ignores it).")
        limit = getattr(module.config, LIMIT, None)
        if not self.positions or torch.compiler.is_compiling():
            return
        if limit != self.limit:
            tables = find_tables(module)
            self.limit, self.allowed = limit, min((table.length for table in tables), default=None)
        if self.allowed is None:
            return
        if args:
            kwargs = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
        tokens, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        length = 0 if tokens is None else tokens.shape[1]
        length += past if isinstance(past, int) else 0  # reading a tensor would wait for the GPU
        if length > self.allowed:
            self._refuse(module, length, kwargs)

    def _refuse(self, module: PreTrainedModel, length: int, inputs: dict[str, Any]) -> None:
        """Raise unless the positions fit after all: in packed inputs, or where padding takes no positions."""
        allowed: Any = self.allowed
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if positions is not None:
            length, allowed = int(positions.max()) + 1, self.limit
        elif mask is not None and mask.ndim == 2:
            length = int(mask.sum(-1).max())
        if length > allowed:
            raise ValueError(
                f"The input has {length} tokens, but {type(module).__name__} has positions for {allowed}. Truncate it "
                f"with tokenizer(..., truncation=True, max_length={allowed}), or extend the position table with "
                f"hf_rfattn.extend_positions(model, {length}) and train the model."
            )


def rf_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Mask function registered under "hf_rfattn"; see the module docstring."""
    custom = kwargs.get("use_vmap") or kwargs.get("local_size") is not None
    bidirectional = mask_function is masking_utils.bidirectional_mask_function
    if not custom and (bidirectional or mask_function is masking_utils.causal_mask_function):
        if attention_mask is None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.int8, device=device)
        else:
            padding: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
            mask = padding[:, None, None, kv_offset : kv_offset + kv_length].to(torch.int8)
        return mask.to(torch.bool) if bidirectional else mask.expand(-1, -1, 2, -1)
    if not custom and attention_mask is None and mask_function.__name__ == "and_mask":
        return _segments(mask_function, batch_size, kv_length, device).expand(-1, -1, 2, -1)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(  # type: ignore[return-value]  # not None, with both skips off
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
    )


def _segments(mask_function: Any, batch_size: int, kv_length: int, device: torch.device | str) -> Tensor:
    """Index of the packed sequence of each position, which increases where a position may not see the one before it.

    Without an overlay (`use_vmap`) or a window (`local_size`), transformers combines two masks by "and" only for packed
    rows: causality and equality of sequence. Evaluating the mask, unlike inspecting its closure, also works under
    torch.compile.
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    position = torch.arange(kv_length, device=device)[None, :]
    together = mask_function(batch, torch.zeros_like(batch), position, (position - 1).clamp(min=0))
    return (~together).to(torch.int32).cumsum(1, dtype=torch.int32)[:, None, None, :]


class Pattern(NamedTuple):
    """Which keys a query may see."""

    key_mask: Tensor | None  # [B, Lk] bool
    segments: Tensor | None  # [B, Lk]
    causal: bool


def read_mask(mask: Tensor, batch: int, k_length: Any) -> Pattern | None:
    """Decode a mask of `rf_mask`, or any mask with one row for all queries. Returns None for an L × L mask."""
    if mask.ndim != 4:
        return None
    causal = (mask.dtype == torch.int8 and mask.shape[2] >= 2) or (mask.dtype == torch.int32 and mask.shape[2] == 2)
    if not causal and mask.shape[1:3] != (1, 1):
        return None
    if mask.shape[3] == 1 and k_length > 1 and mask.dtype in (torch.int8, torch.bool):
        return Pattern(None, None, causal)  # no key is hidden
    row = mask[:, 0, -1].expand(batch, -1)
    if mask.dtype == torch.int32:
        return Pattern(None, row, causal)
    if not mask.dtype.is_floating_point:
        return Pattern(row != 0, None, causal)
    # An additive mask: 0 for visible keys and a large negative number for hidden ones (layoutlm, markuplm).
    expressible = ((row == 0) | (row <= _HIDDEN)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(expressible, _BIAS)
    elif not expressible:
        raise NotImplementedError(_BIAS)
    return Pattern(row == 0, None, causal)


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
    """Attention function registered under "hf_rfattn": `[B, H, L, D]` → `[B, L, H, D]`.

    Layers of a patched model without a mechanism use exact softmax. Attention dropout has no counterpart in linear
    attention, so it applies only to softmax layers.
    """
    layer, part = kwargs.pop(CACHE, None), kwargs.pop(PART, None)
    mechanism: Any = getattr(module, "rf", None)
    if mechanism is None and "rf" not in vars(module):  # patch_model sets rf = None for softmax layers
        raise ValueError(
            f"The attention implementation is {NAME!r} but this model was not patched. Call "
            "hf_rfattn.patch_model(model, 'favor+'), or set attn_implementation='sdpa'."
        )
    for name, reason in _INEXPRESSIBLE.items():
        if mechanism is not None and kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} {reason} ({name}), which {mechanism.config.name!r} attention cannot express. "
                "Leave this layer out with patch_model(model, ..., layers=...)."
            )
    recurrent, length = isinstance(layer, RecurrentLayer), key.shape[2]
    if recurrent:  # the mask covers all tokens so far
        length = layer.keys.shape[2] if layer.static_length is None else layer.static_length
    if attention_mask is not None:
        bias = mechanism is None and part is None and attention_mask.dtype.is_floating_point  # sdpa adds it
        pattern = None if bias else read_mask(attention_mask, key.shape[0], length)
    elif mechanism is not None and query.shape[2] == 1 and part is None:  # one query sees all keys
        pattern = Pattern(None, None, False)
    else:  # the same rule as in transformers' sdpa function
        causal = kwargs.get("is_causal")
        pattern = Pattern(None, None, bool(getattr(module, "is_causal", True) if causal is None else causal))
    if mechanism is None:
        kwargs.update(dropout=dropout, scaling=scaling)
        return _softmax(module, query, key, value, attention_mask, pattern, layer, part, kwargs)
    if pattern is None or (recurrent and attention_mask is not None and attention_mask.dtype != torch.int8):
        raise NotImplementedError(_inexpressible_mask(module, attention_mask, recurrent))
    key_mask, segments, causal = pattern
    if part is not None:
        out = mechanism(query, key, value, part=part.of(causal), causal=causal, scale=scaling)
    elif recurrent:
        out = layer.attend(mechanism, query, key, value, key_mask, scaling)
    else:
        key_mask = None if key_mask is None else key_mask[:, :length]
        segments = None if segments is None else segments[:, :length]
        out = mechanism(query, key, value, key_mask=key_mask, causal=causal, segments=segments, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _inexpressible_mask(module: nn.Module, mask: Any, recurrent: bool) -> str:
    what = f"{type(module).__name__} was given a {mask.dtype} attention mask of shape {tuple(mask.shape)}."
    if recurrent:
        return f"{what} Generation with a patched model needs a 2D attention_mask."
    return (
        f"{what} Patched layers support padding (a 2D mask), causal attention and packed sequences (position_ids that "
        "restart), but not arbitrary L × L masks. Pass a 2D attention_mask, or leave this layer softmax with "
        "patch_model(model, ..., layers=...)."
    )


def _softmax(module, query, key, value, mask, pattern: Pattern | None, layer, part: Part | None, kwargs: dict):
    """Call transformers' sdpa function with a mask that it understands."""
    if part is not None:  # gather the keys and values that the queries of this process may see
        if pattern is None:
            raise NotImplementedError(_inexpressible_mask(module, mask, False))
        stop = part.start + part.length if pattern.causal else None
        key, value = (part.whole(x, 2)[:, :, :stop] for x in (key, value))
        masks = [None if x is None else x[:, :stop] for x in (part.key_mask, part.segments)]
        pattern = Pattern(masks[0], masks[1], pattern.causal)
    elif mask is None:
        pattern = None
    if pattern is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
    key_mask, segments, causal = pattern
    queries, keys, device = query.shape[2], key.shape[2], query.device
    if not causal:
        mask = None if key_mask is None else key_mask[:, None, None, :]
    elif isinstance(layer, StaticLayer):  # it has unused slots after its last key
        position = layer.get_seq_length() - queries + torch.arange(queries, device=device)[:, None]
        mask = (torch.arange(keys, device=device) <= position)[None, None]
        mask = mask if key_mask is None else mask & key_mask[:, None, None, :]
    elif key_mask is None and segments is None and queries == keys:
        mask = None  # `is_causal` is enough
    else:
        mask = allowed_pairs(queries, keys, key_mask, True, segments, device=device)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **{**kwargs, "is_causal": causal})


AttentionInterface.register(NAME, rf_attention_forward)
AttentionMaskInterface.register(NAME, rf_mask)
