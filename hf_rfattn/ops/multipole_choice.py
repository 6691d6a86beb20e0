"""What multipole attention decides before it computes: the order of tokens and the blocks that stay exact.

All of it is constant to autograd, and shared by the fast operators and the naive definition. Hidden tokens never
count, and ties go to the token or block that comes first, so neither padding nor the way a sequence is cut into calls
changes a decision.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .tiles import traced

SUBTILES = 4  # votes of a tile: as good as one vote for each query, at a fraction of the cost
SAMPLE = 4  # every so many tokens tell the variances of all
SPREAD = 8.0  # heads whose queries and keys spread less than this are ordered by content


Order = Literal["position", "content", "auto"]


class Sizes(NamedTuple):
    """Keys a `block`, queries a `tile` (a multiple of 4), number of blocks that are exact, and how many of them are
    the first ones.
    """

    block: int
    tile: int
    chosen: int
    first: int = 0


class CausalSizes(NamedTuple):
    """Keys a `block`; how many blocks are `chosen` by each query, are `local` (before its own), and are the `first`."""

    block: int
    chosen: int
    local: int
    first: int = 0


@torch.no_grad()
def best_first(scores: Tensor, count: int) -> Tensor:
    """Indices `[..., count]` of the largest scores `[..., N]`; of equal ones, the first."""
    return _unique(scores).topk(count, dim=-1, sorted=False).indices


def _unique(scores: Tensor) -> Tensor:
    """Integers in the order of the scores, those of equal scores in falling order."""
    if scores.dtype == torch.float64:  # exactly, where nobody is in a hurry
        return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).neg()
    bits = scores.to(torch.float32).contiguous().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return bits * 2**32 - torch.arange(scores.shape[-1], device=scores.device)


@torch.no_grad()
def choose_blocks(
    tiles: Tensor, counted: Tensor | None, low: Tensor, high: Tensor, count: int, first: int, scale: float
) -> Tensor:
    """Numbers `[N, T, count]` of the blocks that each tile of queries sees exactly.

    `tiles` `[N, T, C, D]`; `counted` `[N, T, C, 1]` tells which of these queries vote. `low` and `high` `[N, B, D]`:
    least and largest coordinates of the keys of each block, +inf and -inf in a block without keys. The `first` blocks
    are always chosen, the others by the bound u_b(x) = Σ_d max(x_d high_bd, x_d low_bd) ≥ max_{j∈b} x·y_j: each
    quarter of a tile votes with the softmax over blocks of its mean bound, and the largest vote counts.
    O(T · B · D).
    """
    parts = tiles.unflatten(2, (SUBTILES, -1))
    if counted is None:
        positive, negative = parts.clamp(min=0).mean(3), parts.clamp(max=0).mean(3)
    else:
        votes = counted.unflatten(2, (SUBTILES, -1)).to(tiles.dtype)
        total = votes.sum(3).clamp(min=1)
        positive, negative = ((parts.clamp(**side) * votes).sum(3) / total for side in ({"min": 0}, {"max": 0}))
    bounds = bound(torch.cat([positive, negative], dim=-1).flatten(1, 2) * scale, low, high)
    bounds = (bounds - bounds.logsumexp(-1, keepdim=True)).unflatten(1, (-1, SUBTILES))
    if counted is not None:
        bounds = bounds.masked_fill(~counted.unflatten(2, (SUBTILES, -1)).any(3), -torch.inf)
    return best_first(_with_first(bounds.amax(2), first), count)


def bound(parts: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """u_b(x) `[..., Q, B]` from positive and negative parts of x `[..., Q, 2D]`; -inf for blocks without keys."""
    empty = high[..., 0] < low[..., 0]
    positive, negative = parts.chunk(2, dim=-1)
    bounds = positive @ high.mT + negative @ low.mT
    return bounds.masked_fill(empty.unsqueeze(-2), torch.finfo(parts.dtype).min)


def _with_first(scores: Tensor, first: int) -> Tensor:
    number = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(number < first, torch.inf)


class Choice(NamedTuple):
    """What causal queries see; N is the number of blocks."""

    own: Tensor  # [B, 1, R, 1], block of the last key that each query sees
    between: Tensor  # [B, 1, R, N], blocks that can be chosen
    chosen: Tensor  # [B, K, R, t]
    far: Tensor  # [B, K, R, N], log of the number of keys of blocks that count as means, else -inf


@torch.no_grad()
def choose_for_each(x: Tensor, rank: Tensor, low: Tensor, high: Tensor, sizes: CausalSizes) -> Choice:
    """The choice of each causal query for itself, by the same bound.

    Queries `[B, K, R, D]` carry the scale; each sees `rank` `[B, 1, R]` keys before the last one it sees, -1 if none.
    `low` and `high` `[B, K, N, D]` as in `choose_blocks`. Between the first and the local blocks all have `sizes.block`
    keys.
    """
    number = torch.arange(low.shape[2], device=x.device)
    own = rank.div(sizes.block, rounding_mode="floor").unsqueeze(-1)
    between = (number >= sizes.first) & (number < own - sizes.local)
    bounds = bound(torch.cat([x.clamp(min=0), x.clamp(max=0)], dim=-1), low.to(x.dtype), high.to(x.dtype))
    bounds = bounds.masked_fill(~between, torch.finfo(x.dtype).min)
    chosen = best_first(bounds, min(sizes.chosen, low.shape[2]))
    far = torch.full_like(bounds, math.log(sizes.block)).masked_fill(~between, -torch.inf)
    return Choice(own, between, chosen, far.scatter(3, chosen, -torch.inf))


@torch.no_grad()
def orders(x, y, x_seen, y_seen, sizes: Sizes, order: Order, scale: float) -> tuple[Any, Any]:
    """Positions of keys `[B, Hkv, Lk]` and queries `[B, H, Lq]`, those that exist first; None if they stay in place."""
    (B, H), heads = x.shape[:2], y.shape[1]
    y_order, x_order = (
        None if seen is None else seen.long().argsort(dim=2, descending=True, stable=True).expand(B, n, -1)
        for seen, n in ((y_seen, heads), (x_seen, H))
    )
    if order == "position":
        return y_order, x_order
    y, x = take(y.detach(), y_order), take(x.detach(), x_order)
    y_seen, x_seen = (
        None if seen is None else seen.expand(B, z.shape[1], -1).gather(2, o)
        for z, seen, o in ((y, y_seen, y_order), (x, x_seen, x_order))
    )
    content = torch.ones(B, heads, dtype=torch.bool, device=x.device)
    if order == "auto":
        some: list[Any] = [None if z is None else z[:, :, ::SAMPLE] for z in (x, y, x_seen, y_seen)]
        content = prefers_content(some[0], some[1], some[2], some[3], scale)
    if not traced() and not content.any():
        return y_order, x_order

    def by_content(z: Tensor, seen: Tensor | None, before: Tensor | None, leaf: int, first: int) -> Tensor:
        which = content.repeat_interleave(z.shape[1] // heads, 1).flatten()
        seen = None if seen is None else seen.flatten(0, 1)
        found = content_order(z.flatten(0, 1), seen, which, leaf, first).view(z.shape[:3])
        return found if before is None else before.gather(2, found)

    return (
        by_content(y, y_seen, y_order, sizes.block, sizes.first * sizes.block),
        by_content(x, x_seen, x_order, sizes.tile, 0),
    )


def take(x: Tensor, order: Tensor | None) -> Tensor:
    """Tokens `[B, H, L, D]` in another order, in which each comes once: `[B, H, L]`."""
    if order is None:
        return x
    if traced():
        return x.gather(2, order.unsqueeze(-1).expand_as(x))
    return _Permute.apply(x, order)


def inverse(order: Tensor) -> Tensor:
    """Where each position of an order `[B, H, L]` has gone."""
    at = torch.arange(order.shape[2], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(2, order, at)


class _Permute(torch.autograd.Function):
    """Rows in another order; torch would add up gradients of rows one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        B, H, L, D = x.shape
        start = torch.arange(B * H, device=x.device).view(B, H, 1) * L
        return x.reshape(-1, D).index_select(0, (order + start).flatten()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Permute.apply(grad, inverse(ctx.saved_tensors[0])), None


@torch.no_grad()
def prefers_content(x: Tensor, y: Tensor, x_seen: Tensor | None, y_seen: Tensor | None, scale: float) -> Tensor:
    """`[B, K]`, True for key heads whose tokens are better ordered by content than by position.

    Queries `[B, H, Lq, D]` and keys `[B, K, Lk, D]`, all or a sample; `x_seen` and `y_seen` `[B, 1 or H, L]`: those
    that count. Where they spread widely, scores are sharp and mostly local, and neighbours in the text share their
    keys. Where they spread little, attention is diffuse, and blocks of similar keys have better means. The spread is
    the geometric mean of both total variances, in units of the scores.
    """
    spread_x = _variances(x, x_seen).sum(-1).unflatten(1, (y.shape[1], -1)).mean(-1)
    return (spread_x * _variances(y, y_seen).sum(-1)).sqrt() * scale < SPREAD


def _variances(x: Tensor, seen: Tensor | None) -> Tensor:
    """Variance of each coordinate: `[..., L, D]` → `[..., D]`."""
    if seen is None:
        return (x.square().mean(-2) - x.mean(-2).square()).clamp(min=0)
    one = seen.to(x.dtype).unsqueeze(-1)
    count = one.sum(-2).clamp(min=1)
    x = x.masked_fill(~seen.unsqueeze(-1), 0)
    return (x.square().sum(-2) / count - (x.sum(-2) / count).square()).clamp(min=0)


@torch.no_grad()
def content_order(y: Tensor, seen: Tensor | None, which: Tensor, leaf: int, first: int) -> Tensor:
    """Positions `[N, L]` of tokens `[N, L, D]` such that each run of `leaf` of them is near in content.

    A k-d tree: all tokens are halved by their coordinate of the largest variance, the halves by the next one, until
    `leaf` tokens are left. Tokens that exist (`seen` `[N, L]`, which must come first) are before the others, and the
    `first` of them stay before all. Sequences that `which` `[N]` does not name stay as they are. O(L · log L).
    """
    return (_content_order if traced() else _tree)(y.detach(), seen, which, leaf, first)


def _tree(y: Tensor, seen: Tensor | None, which: Tensor, leaf: int, first: int) -> Tensor:
    N, L, D = y.shape
    levels = math.ceil(math.log2(max(-(-L // leaf), 1)))
    slots = torch.arange(L, device=y.device).expand(N, L).clone()
    if levels == 0 or N == 0:
        return slots
    variances = _variances(y[:, ::SAMPLE], None if seen is None else seen[:, ::SAMPLE])
    dims = variances.argsort(dim=1, descending=True, stable=True)[:, : min(levels, D)]
    columns = y.gather(2, dims[:, None].expand(-1, L, -1))[which].mT.clone()  # [W, levels, L]
    if seen is not None:
        columns.masked_fill_(~seen[which].unsqueeze(1), torch.inf)
    columns[:, :, :first] = columns[:, :, :first].where(columns[:, :, :first] == torch.inf, -torch.inf)
    own_levels = torch.full((columns.shape[0],), levels, device=y.device)
    if seen is not None:  # hidden tokens fill the right half of the upper levels, where nothing is to be decided
        leaves = -(-seen[which].sum(1) // leaf)
        own_levels = leaves.clamp(min=1).double().log2().ceil().long()
    found = _halve(F.pad(columns, (0, leaf * 2**levels - L), value=torch.inf), levels, own_levels)
    slots[which] = found if found.shape[1] == L else found[found < L].view(-1, L)  # padding was in the last leaves
    return slots


def _halve(columns: Tensor, levels: int, own_levels: Tensor) -> Tensor:
    """Leaves of the tree one after the other: slots `[W, S]` from coordinates `[W, levels, S]`, S = leaf · 2^levels.

    The tokens of a sequence fill the left `own_levels` `[W]` of the tree.
    """
    W, dims, size = columns.shape
    keys = -_unique(-columns)  # all different
    slots = torch.arange(size, device=columns.device).expand(W, size)
    for level in range(levels):
        column = (level - levels + own_levels).clamp(min=0) % dims
        key = keys[torch.arange(W, device=keys.device), column].gather(1, slots).view(-1, size >> level)
        sides = [key.topk(key.shape[1] // 2, dim=1, largest=large, sorted=False).indices for large in (False, True)]
        slots = slots.reshape(key.shape).gather(1, torch.cat(sides, dim=1)).view(W, size)
    return slots.view(W, 2**levels, -1).sort(dim=2).values.view(W, size)


@torch.library.custom_op("hf_rfattn::content_order", mutates_args=())
def _content_order(y: Tensor, seen: Tensor | None, which: Tensor, leaf: int, first: int) -> Tensor:
    """For compilers: the depth of the tree depends on the length."""
    return _tree(y, seen, which, leaf, first)


@_content_order.register_fake
def _(y, seen, which, leaf, first):
    return torch.empty(y.shape[:2], dtype=torch.long, device=y.device)


@_content_order.register_vmap
def _(info, in_dims, y, seen, which, leaf, first):
    def flat(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        return (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    found = _content_order(*map(flat, (y, seen, which), in_dims[:3]), leaf, first)
    return found.unflatten(0, (info.batch_size, -1)), 0
