"""How padding, packing and causality travel from the model to the attention function: in one small integer tensor.

transformers builds its masks once a forward pass and hands the result to every layer. The mask function registered
here never builds an L × L matrix. It answers with a tensor `[B or 1, 1, R, Lk or 1]`: uint8 for padding (1 = the key
exists) or int32 for packing (number of the key's sequence); R = 1 for bidirectional and R = 2 for causal attention.
Models only hand it on or cut its last dimension. Patterns that features cannot express (sliding windows, overlays)
become ordinary boolean masks, for the layers that stay softmax; a patched layer refuses them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from ..ops import allowed_pairs


class Pattern(NamedTuple):
    """Which keys a query may see."""

    key_mask: Tensor | None  # [B, Lk] bool
    segments: Tensor | None  # [B, Lk]
    causal: bool


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
    """The mask function registered under "hf_rfattn"."""
    custom = kwargs.get("use_vmap") or kwargs.get("local_size") is not None
    if not custom and mask_function is masking_utils.causal_mask_function:
        causal, row = True, _padding(attention_mask, kv_length, kv_offset, device)
    elif not custom and mask_function is masking_utils.bidirectional_mask_function:
        causal, row = False, _padding(attention_mask, kv_length, kv_offset, device)
    elif not custom and attention_mask is None and mask_function.__name__ == "and_mask":
        causal, row = True, _segments(mask_function, batch_size, kv_length, device)
    else:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking_utils.sdpa_mask(  # type: ignore[return-value]  # not None, with both skips off
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
        )
    return row.expand(-1, -1, 2 if causal else 1, -1)


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int, device: torch.device | str) -> Tensor:
    if attention_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.uint8, device=device)
    padding: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return padding[:, None, None, kv_offset : kv_offset + kv_length].to(torch.uint8)


def _segments(mask_function: Any, batch_size: int, kv_length: int, device: torch.device | str) -> Tensor:
    """Numbers of packed sequences, found by asking whether each position may see the one before it.

    Without an overlay (`use_vmap`) or a window (`local_size`), transformers joins two masks by "and" only for packed
    rows: causality and equality of sequence. Asking, unlike looking into the closure, also works while torch.compile
    traces.
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    position = torch.arange(kv_length, device=device)[None, :]
    together = mask_function(batch, torch.zeros_like(batch), position, (position - 1).clamp(min=0))
    return (~together).to(torch.int32).cumsum(1, dtype=torch.int32)[:, None, None, :]


def is_compact(mask: Tensor | None) -> bool:
    """Whether a mask is one of ours (softmax masks are boolean or floating)."""
    return mask is not None and mask.dtype in (torch.uint8, torch.int32) and mask.ndim == 4 and mask.shape[2] in (1, 2)


def read_pattern(mask: Tensor, batch: int, k_length: int) -> Pattern:
    """What a compact mask says of `k_length` keys."""
    causal = mask.shape[2] == 2
    row = mask[:, 0, 0]
    if mask.dtype == torch.int32:
        return Pattern(None, row[:, :k_length].expand(batch, -1), causal)
    if row.shape[1] == 1:
        return Pattern(None, None, causal)
    return Pattern(row[:, :k_length].expand(batch, -1) != 0, None, causal)


def dense_mask(
    pattern: Pattern, q_length: int, k_length: int, device: torch.device, start: int | Tensor | None = None
) -> Tensor | None:
    """The same as a boolean mask for sdpa; None where `is_causal` alone says it. `start`: position of the first query,
    by default such that the last one stands at the last key."""
    if start is not None and pattern.causal:  # a static cache, with room behind its last key
        seen = torch.arange(k_length, device=device) <= start + torch.arange(q_length, device=device)[:, None]
        return seen[None, None] if pattern.key_mask is None else seen & pattern.key_mask[:, None, None, :]
    if pattern.key_mask is None and pattern.segments is None and (not pattern.causal or q_length == k_length):
        return None
    return allowed_pairs(q_length, k_length, pattern.key_mask, pattern.causal, pattern.segments, device=device)
