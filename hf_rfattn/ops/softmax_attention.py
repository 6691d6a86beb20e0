"""The attention everything here is measured against, with the same masks, through torch's own fused kernel."""

import torch.nn.functional as F
from torch import Tensor

from .naive import allowed_pairs


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Exact softmax attention `[B, H, L, D]`; rows with no visible key give zeros."""
    mask = None
    if key_mask is not None and not causal and segments is None:
        mask = key_mask[:, None, None, :]
    elif key_mask is not None or segments is not None or (causal and q.shape[2] != k.shape[2]):
        mask = allowed_pairs(q.shape[2], k.shape[2], key_mask, causal, segments, device=q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
