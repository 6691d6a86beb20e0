"""How padding, packing and causality travel from the model to the attention function: in one small tensor.

transformers builds its masks once a forward pass and hands the result to every layer. The mask function registered
here never builds an L × L matrix:
- bidirectional: an ordinary boolean mask with one row for all queries, `[B or 1, 1, 1, Lk]`, True where a key exists;
- causal: a compact mask `[B or 1, 1, 2, Lk]`, recognised by its two rows and its integer type: int8 for padding
  (1 = the key exists) or int32 for packing (the number of the key's sequence). transformers' exporters join the masks
  of several steps row by row; the last one tells of all their keys;
- nothing hidden: the same with a last dimension of 1;
- anything else (windows, overlays): an ordinary mask of pairs, for layers that stay softmax; patched ones refuse it.
Models only hand the mask on or cut its last dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from ..ops.naive import allowed_pairs


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
    if not custom and mask_function is masking_utils.bidirectional_mask_function:
        return _padding(attention_mask, kv_length, kv_offset, device).to(torch.bool)
    if not custom and mask_function is masking_utils.causal_mask_function:
        return _padding(attention_mask, kv_length, kv_offset, device).expand(-1, -1, 2, -1)
    if not custom and attention_mask is None and mask_function.__name__ == "and_mask":
        return _segments(mask_function, batch_size, kv_length, device).expand(-1, -1, 2, -1)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return masking_utils.sdpa_mask(  # type: ignore[return-value]  # not None, with both skips off
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
    )


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int, device: torch.device | str) -> Tensor:
    if attention_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.int8, device=device)
    padding: Any = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return padding[:, None, None, kv_offset : kv_offset + kv_length].to(torch.int8)


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
    """Whether a mask is a causal one of ours (softmax masks are boolean or floating)."""
    if mask is None or mask.ndim != 4:
        return False
    return (mask.dtype == torch.int8 and mask.shape[2] >= 2) or (mask.dtype == torch.int32 and mask.shape[2] == 2)


def hides_nothing(mask: Tensor, k_length: int) -> bool:
    """Whether a mask of ours stands for any number of keys, all visible."""
    return mask.shape[3] == 1 and k_length > 1 and mask.dtype in (torch.int8, torch.bool)


def read_pattern(mask: Tensor, batch: int, k_length: int) -> Pattern:
    """What a compact mask says of `k_length` keys."""
    if hides_nothing(mask, k_length):
        return Pattern(None, None, True)
    row = mask[:, 0, -1, :k_length].expand(batch, -1)
    return Pattern(row != 0, None, True) if mask.dtype == torch.int8 else Pattern(None, row, True)


def dense_mask(
    pattern: Pattern, q_length: int, k_length: int, device: torch.device, start: int | Tensor | None = None
) -> Tensor | None:
    """The same causal pattern as a boolean mask for sdpa; None where `is_causal` alone says it.

    `start`: position of the first query, by default such that the last one stands at the last key.
    """
    if start is not None:  # a static cache, with room behind its last key
        seen = torch.arange(k_length, device=device) <= start + torch.arange(q_length, device=device)[:, None]
        return seen[None, None] if pattern.key_mask is None else seen & pattern.key_mask[:, None, None, :]
    if pattern.key_mask is None and pattern.segments is None and q_length == k_length:
        return None
    return allowed_pairs(q_length, k_length, pattern.key_mask, True, pattern.segments, device=device)
