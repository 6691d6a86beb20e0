"""Naive definitions as dense L × L matrices, written for readability. The fast operators are tested against them."""

import torch
from torch import Tensor

from .multipole_choice import (
    CausalSizes,
    Order,
    Sizes,
    choose_blocks,
    choose_for_each,
    inverse,
    orders,
    take,
)
from .tiles import into_tiles


def allowed_pairs(
    q_length: int,
    k_length: int,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
    bandwidth: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[B or 1, 1, Lq, Lk]`, True where query i may see key j; the last query is aligned with the last key.

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
    """Divide each row of the allowed `scores` by its sum. Rows without allowed keys are zero.

    `floor`, a magnitude per pair, bounds the denominator of signed scores away from zero.
    """
    scores = scores.masked_fill(~allowed, 0)
    total = scores.sum(-1, keepdim=True)
    if floor is not None:
        least = (floor * allowed).sum(-1, keepdim=True)
        total = torch.where(total < 0, -1.0, 1.0) * torch.maximum(total.abs(), least)
    return scores / total.masked_fill(total == 0, 1)


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys. Rows without allowed keys are zero."""
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def multipole_weights(x: Tensor, y: Tensor, sizes: Sizes, order: Order, seen: Tensor, global_rows: int) -> Tensor:
    """Multipole attention of one sequence as a dense matrix `[H, Lq, Lk]`.

    Queries `[H, Lq, D]` and keys `[K, Lk, D]` include the square root of the scale; `seen` `[Lk]`: False for padding
    (also of queries if Lq = Lk). The first `global_rows` queries that are not padding see every key.
    """
    x, y, y_seen = x[None], y[None], seen[None, None]
    x_seen = y_seen if x.shape[2] == y.shape[2] else torch.ones_like(x[:, :1, :, 0], dtype=torch.bool)
    y_order, x_order = orders(x, y, x_seen, y_seen, sizes, order, 1.0)
    heads, y = x.shape[1], repeat_heads(y, x.shape[1])
    y_order = repeat_heads(y_order, heads)
    block, tile = inverse(y_order) // sizes.block, inverse(x_order) // sizes.tile  # [1, H, L]
    number = torch.arange(-(-y.shape[2] // sizes.block), device=y.device)
    member = ((block.unsqueeze(2) == number[:, None]) & y_seen.unsqueeze(2))[0]  # [H, B, Lk]

    tiles = into_tiles(take(x, x_order), sizes.tile, heads)[0]  # [H, T, C, D]
    counted = into_tiles(x_seen.expand(1, heads, -1).gather(2, x_order).unsqueeze(-1), sizes.tile, heads)[0]
    means, radius = _means(y[0], member)
    chosen = choose_blocks(tiles, counted, means, radius, min(sizes.chosen, len(number)), sizes.first, 1.0)
    near = torch.zeros(*chosen.shape[:2], len(number), device=x.device).scatter(2, chosen, 1.0)
    near = near.bool().gather(1, tile[0].unsqueeze(-1).expand(-1, -1, len(number)))  # [H, Lq, B]
    if x.shape[2] == y.shape[2]:
        near = near | ((seen.cumsum(0) <= global_rows) & seen)[:, None]
    return _near_and_far(x[0], y[0], member, near, ~near)


def causal_multipole_weights(x: Tensor, y: Tensor, sizes: CausalSizes, seen: Tensor) -> Tensor:
    """Causal multipole attention of one sequence as a dense matrix `[H, L, L]`; see `multipole_weights`."""
    y = repeat_heads(y[None], x.shape[0])[0]
    rank = seen.long().cumsum(0) - 1
    number = torch.arange(-(-y.shape[1] // sizes.block), device=y.device)
    member = ((rank // sizes.block == number[:, None]) & seen).expand(y.shape[0], -1, -1)
    means, radius = _means(y, member)
    _, far = choose_for_each(x[None], rank[None, None], (x @ means.mT)[None], radius[None], sizes)
    far = far[0] > -torch.inf  # [H, L, B]
    allowed = (rank <= rank[:, None]) & seen  # key j is not padding and not later than query i
    return _near_and_far(x, y, member, ~far, far, allowed)


def _means(y: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Mean key and radius of each block: `[H, L, D]`, `[H, B, L]` → `[H, B, D]`, `[H, B]`."""
    one = member.to(y.dtype)
    count = one.sum(2)
    means = (one @ y) / count.clamp(min=1).unsqueeze(-1)
    distances = (y.unsqueeze(1) - means.unsqueeze(2)).square().sum(-1)  # [H, B, L]
    radius = ((one * distances).sum(2) / count.clamp(min=1)).sqrt()
    return means, radius.masked_fill(count == 0, -torch.inf)


def _near_and_far(x, y, member: Tensor, near: Tensor, far: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Weights with exact keys in near blocks and the mean key in far blocks: `near`, `far` `[H, Lq, B]`."""
    one, (means, _) = member.to(y.dtype), _means(y, member)
    count = one.sum(2)
    exact = near.to(y.dtype) @ one > 0
    if allowed is not None:
        exact = exact & allowed
    far = far & (count > 0).unsqueeze(1)
    scores = torch.cat([x @ y.mT, x @ means.mT + count.clamp(min=1).log().unsqueeze(1)], dim=-1)
    weights = masked_softmax(scores, torch.cat([exact, far], dim=-1))
    keys, blocks = weights.split([y.shape[1], means.shape[1]], dim=-1)
    return keys + (blocks / count.clamp(min=1).unsqueeze(1)) @ one
