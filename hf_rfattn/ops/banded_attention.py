"""Exact softmax scores where they are few: within a band around the diagonal, and to and from a few global tokens.

All are linear in L: a band never becomes a dense masked matrix, and the scores held are those of neighbouring tiles.
"""

import torch
from torch import Tensor

from .inputs import Inputs
from .partial import Partial, exp_less, normalise
from .scratch import product
from .tiles import neighbourhood


def attend_band(x: Tensor, y: Tensor, v: Tensor, allowed: Tensor, left: int, right: int) -> Partial:
    """Attention with weights exp(x_iᵀy_j) over the `allowed` keys of each tile's neighbourhood, not yet normalised.

    Queries `[B, Hkv, T, G·C, D]` and keys `[B, Hkv, left + T + right, C, D]` carry the scale already.
    """
    scores = product(x, neighbourhood(y, left, right).transpose(-1, -2))
    rows = scores.unflatten(3, (-1, allowed.shape[3]))  # the query heads of a group apart
    rows += allowed.to(v.dtype).log().unsqueeze(3)
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = exp_less(scores, scale, reuse=True)
    return Partial(product(weights, neighbourhood(v, left, right)), weights.sum(-1, keepdim=True), scale)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Partial:
    """Attention with weights exp(q_iᵀk_j) over a few keys `[B, Hkv, N, D]`, not yet normalised; `allowed` is `[B, L or
    1, N]`.
    """
    B, H, L, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, L, D)
    shown = allowed[:, None, None].to(q.dtype)
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2) + shown.log()  # [B, Hkv, G, L, N]
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = exp_less(scores, scale)
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


def global_attention(inputs: Inputs, count: int, bandwidth: int) -> Partial:
    """Attention with weights exp(x_iᵀy_j) over the global keys farther than `bandwidth`, not yet normalised.

    There are at most `count` of them at each end of a sequence; each query sees those of its own.
    """
    x, y = (z.to(inputs.dtype) * inputs.root for z in (inputs.q, inputs.k))
    v = inputs.v.to(inputs.dtype)
    B, H, L, D = x.shape
    K = y.shape[1]
    segments = inputs.segments
    chosen = global_keys(L, count, inputs.key_mask, inputs.causal, segments, x.device).expand(B, L)
    index = _global_index(chosen, count if inputs.causal else 2 * count, segments)  # [B, L or 1, N]
    N = index.shape[-1]
    distance = torch.arange(L, device=x.device)[None, :, None] - index
    present = (index >= 0) & (distance.abs() > bandwidth)
    if inputs.causal:
        present = present & (distance >= 0)
    flat = index.clamp(min=0).flatten(1)[:, None, :, None]
    y, v = (z.gather(2, flat.expand(-1, K, -1, z.shape[-1])) for z in (y, v))  # [B, K, L · N or N, E]
    if segments is None:
        return exact_attention(x, y, v, present)
    y, v = (z.view(B, K, 1, L, N, z.shape[-1]) for z in (y, v))
    scores = (x.view(B, K, H // K, L, 1, D) * y).sum(-1)  # [B, K, G, L, N]
    shown = present[:, None, None].to(v.dtype)
    scores = scores + shown.log()
    scale = scores.detach().amax(dim=-1, keepdim=True)
    weights = exp_less(scores, scale)
    parts = (weights.unsqueeze(-1) * v).sum(-2), weights.sum(-1, keepdim=True), scale
    return Partial(*(z.reshape(B, H, L, -1) for z in parts))


def with_global_rows(out: Tensor, inputs: Inputs, count: int) -> Tensor:
    """The same output, with softmax over all keys of their sequence in the rows of global tokens. Causal ones, at the
    start of a sequence, see hardly any others.
    """
    if not count or inputs.causal:
        return out
    B, H, L, D = out.shape
    segments = inputs.segments
    chosen = global_keys(L, count, inputs.key_mask, False, segments, out.device).expand(B, L)
    # of packed sequences there may be any number, which only the device knows
    slots = min(2 * count if segments is None else int(chosen.sum(1).max()), L)
    index = _global_index(chosen, slots, None)[:, 0]  # [B, N]
    there = index >= 0
    index = index.clamp(min=0)
    allowed = torch.ones(1, 1, L, dtype=torch.bool, device=out.device)
    if inputs.key_mask is not None:
        allowed = allowed & inputs.key_mask[:, None]
    if segments is not None:
        segments = segments.expand(B, L)
        allowed = allowed & (segments.gather(1, index)[:, :, None] == segments[:, None])
    at = index[:, None, :, None]
    q = inputs.q.gather(2, at.expand(-1, H, -1, inputs.q.shape[-1]))
    v = inputs.v.to(inputs.dtype)
    rows = normalise(exact_attention(inputs.scaled(q), inputs.scaled(inputs.k), v, allowed)).to(out.dtype)
    rows = rows.masked_fill(~there[:, None, :, None], 0)
    return out.masked_fill(chosen[:, None, :, None], 0).scatter_add(2, at.expand(-1, H, -1, D), rows)


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
