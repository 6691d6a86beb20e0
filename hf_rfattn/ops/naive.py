"""Naive definitions: dense L × L matrices, written to be read. The fast operators are tested against these."""

import torch
from torch import Tensor


def allowed_pairs(
    q_length: int,
    k_length: int,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
    bandwidth: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[B or 1, 1, Lq, Lk]`, True where query i may see key j; the last query stands at the last key.

    >>> allowed_pairs(3, 3, causal=True).int()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    i = torch.arange(q_length, device=device)[:, None] + (k_length - q_length)
    j = torch.arange(k_length, device=device)[None, :]
    allowed = (j <= i) if causal else torch.ones_like(i >= j)
    if bandwidth is not None:
        allowed = allowed & ((i - j).abs() <= bandwidth)
    allowed = allowed[None, None]
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    if segments is not None:
        allowed = allowed & (segments[:, None, -q_length:, None] == segments[:, None, None, :])
    return allowed


def normalised_weights(scores: Tensor, allowed: Tensor, floor: Tensor | None = None) -> Tensor:
    """Each row of the allowed `scores` divided by its sum; rows with nothing allowed are zero.

    `floor`, a magnitude for each pair, guards rows of signed scores whose sum nearly vanishes.
    """
    scores = scores.masked_fill(~allowed, 0)
    total = scores.sum(-1, keepdim=True)
    if floor is not None:
        least = (floor * allowed).sum(-1, keepdim=True)
        total = torch.where(total < 0, -1.0, 1.0) * torch.maximum(total.abs(), least)
    return scores / total.masked_fill(total == 0, 1)


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; rows with nothing allowed are zero."""
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
