"""Exact softmax scores where they are few: within a band around the diagonal, and to a few global keys.

Both are linear in L: a band never becomes a dense masked matrix, and the scores held are those of neighbouring tiles.
"""

import torch
from torch import Tensor

from .partial import Partial, finite
from .tiles import into_tiles, neighbourhood, pairs, queries_from_tiles, queries_into_tiles, visible_tiles


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bandwidth: int,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
) -> Partial:
    """Attention with weights exp(q_iᵀk_j) over the keys at distance `bandwidth` or less, not yet normalised.

    Queries and keys carry the scale already. A causal band holds the query's own key and the `bandwidth` before it.
    """
    B, H, L, _ = q.shape
    K = k.shape[1]
    size = min(max(bandwidth, 32), 128)
    visible = visible_tiles(key_mask, B, L, size, q.device)
    left = min(-(-bandwidth // size), visible.shape[2] - 1)
    right = 0 if causal else left
    tile_segments = None if segments is None else into_tiles(segments[:, None, :, None], size)
    allowed = pairs(visible, tile_segments, left, right, causal, (bandwidth, None))
    k_near = neighbourhood(into_tiles(k, size), left, right)
    v_near = neighbourhood(into_tiles(v, size), left, right)
    scores = queries_into_tiles(q, size, K) @ k_near.transpose(-1, -2)
    scores = scores.masked_fill(~allowed.repeat(1, 1, 1, H // K, 1), -torch.inf)
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - finite(scale))
    partial = Partial(weights @ v_near, weights.sum(-1, keepdim=True), scale)
    return Partial(*(queries_from_tiles(x, H, L) for x in partial))


def exact_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Partial:
    """Attention with weights exp(q_iᵀk_j) over a few keys `[B, Hkv, N, D]`, not yet normalised; `allowed` is `[B, L or
    1, N]`.
    """
    B, H, L, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, L, D)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2)  # [B, Hkv, G, L, N]
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - finite(scale))
    parts = (weights @ v.unsqueeze(2), weights.sum(-1, keepdim=True), scale)
    return Partial(*(x.reshape(B, H, L, -1) for x in parts))


def global_keys(L: int, count: int, key_mask: Tensor | None, causal: bool, segments: Tensor | None, device) -> Tensor:
    """`[B or 1, L]`, True for the first `count` visible keys of each sequence and, unless causal, the last ones too."""
    visible = torch.ones(1, L, dtype=torch.bool, device=device) if key_mask is None else key_mask
    chosen = _rank(visible, segments) < count
    if not causal:
        flipped = None if segments is None else segments.flip(1)
        chosen = chosen | (_rank(visible.flip(1), flipped) < count).flip(1)
    return chosen & visible


def _rank(visible: Tensor, segments: Tensor | None) -> Tensor:
    """How many visible keys of its own segment stand before each position."""
    before = visible.long().cumsum(1) - visible.long()
    if segments is None:
        return before
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    before = before.expand_as(segments)
    return before - before.masked_fill(~starts, 0).cummax(1).values


def global_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    bandwidth: int,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
) -> Partial:
    """Attention with weights exp(q_iᵀk_j) over the global keys farther than `bandwidth`, not yet normalised.

    There are at most `count` of them at each end of a sequence; each query gathers those of its own.
    """
    B, H, L, D = q.shape
    K = k.shape[1]
    chosen = global_keys(L, count, key_mask, causal, segments, q.device).expand(B, L)
    index = _global_index(chosen, count if causal else 2 * count, segments)  # [B, L or 1, N]
    N = index.shape[-1]
    position = torch.arange(L, device=q.device)[None, :, None]
    present = index >= 0
    index = index.clamp(min=0)
    distance = position - index
    present = present & (distance.abs() > bandwidth)
    if causal:
        present = present & (distance >= 0)

    def gather(x: Tensor) -> Tensor:  # [B, K, L, E] → [B, K, 1, L or 1, N, E]
        flat = index.flatten(1)[:, None, :, None].expand(-1, K, -1, x.shape[-1])
        return x.gather(2, flat).view(B, K, 1, -1, N, x.shape[-1])

    grouped = q.view(B, K, H // K, L, 1, D)
    scores = (grouped * gather(k)).sum(-1)  # [B, K, G, L, N]
    scores = scores.masked_fill(~present[:, None, None], -torch.inf)
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - finite(scale))
    numerator = (weights.unsqueeze(-1) * gather(v)).sum(-2)
    return Partial(*(x.reshape(B, H, L, -1) for x in (numerator, weights.sum(-1, keepdim=True), scale)))


def _global_index(chosen: Tensor, slots: int, segments: Tensor | None) -> Tensor:
    """Positions of the chosen keys of each query's sequence, -1 in empty slots: `[B, L, N]`, or `[B, 1, N]` if one."""
    B, L = chosen.shape
    if segments is None:
        segments_q = torch.zeros(B, 1, dtype=torch.long, device=chosen.device)
        number = segments_q.expand(B, L)
    else:
        change = torch.zeros(B, L, dtype=torch.long, device=chosen.device)
        change[:, 1:] = segments[:, 1:] != segments[:, :-1]
        segments_q = number = change.cumsum(1)
    slot = _rank(chosen, None if segments is None else number)
    table = torch.full((B, (L if segments is not None else 1) * slots + 1), -1, device=chosen.device)
    cell = torch.where(chosen, number * slots + slot, table.shape[1] - 1)  # the last cell takes what is not chosen
    table = table.scatter(1, cell, torch.arange(L, device=chosen.device).expand(B, L))[:, :-1]
    rows = segments_q[:, :, None] * slots + torch.arange(slots, device=chosen.device)
    return table.gather(1, rows.flatten(1)).view(B, -1, slots)
