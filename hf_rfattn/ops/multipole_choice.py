"""Decisions of multipole attention: the order of tokens and the choice of exact blocks.

The fast operators and the naive definition share them, and autograd treats them as constants. Padding is ignored and
ties go to the first token or block, so decisions depend neither on padding nor on how a sequence is split into calls.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .tiles import traced

SUBTILES = 4  # votes per tile: as good as one vote per query, at a fraction of the cost
DEVIATIONS = 3.0  # standard deviations above the mean score of a block; 2 and 4 work nearly as well
SAMPLE = 4  # variances are estimated from every fourth token
BITS = 16  # bits of the content code of a token, at most 16
SPREAD = 8.0  # heads with less spread of queries and keys than this are ordered by content


Order = Literal["position", "content", "auto"]


class Sizes(NamedTuple):
    """Keys per `block`, queries per `tile` (a multiple of 4), number of exact blocks (`chosen`), of which the `first`
    ones of the sequence are fixed.
    """

    block: int
    tile: int
    chosen: int
    first: int = 0


class CausalSizes(NamedTuple):
    """Keys per `block`; numbers of blocks that are `chosen` by each query, `local` (before its own) and `first`."""

    block: int
    chosen: int
    local: int
    first: int = 0


@torch.no_grad()
def best_first(scores: Tensor, count: int) -> Tensor:
    """Indices `[..., count]` of the largest scores `[..., N]`; ties go to the first."""
    return _unique(scores).topk(count, dim=-1, sorted=False).indices


def _unique(scores: Tensor) -> Tensor:
    """Distinct integers in the order of the scores; among equal scores, earlier ones are larger."""
    if scores.dtype == torch.float64:  # slower but exact
        return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).neg()
    bits = scores.to(torch.float32).contiguous().view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats are in reverse order
    return bits.long().mul_(2**32).sub_(torch.arange(scores.shape[-1], device=scores.device))


@torch.no_grad()
def choose_blocks(
    tiles: Tensor, counted: Tensor | None, mean_y: Tensor, radius: Tensor, count: int, first: int, scale: float
) -> Tensor:
    """Indices `[N, T, count]` of the exact blocks of each tile of queries.

    `tiles` `[N, T, C, D]`; `counted` `[N, T, C, 1]`: True for queries that vote. `mean_y` `[N, B, D]` and `radius`
    `[N, B]` of each block, see `radius_of`. The `first` blocks are always chosen, the others by `likely_largest`: each
    quarter of a tile votes with the softmax of its mean query over blocks, and a block's score is its largest vote.
    O(T · B · D).
    """
    parts = tiles.unflatten(2, (SUBTILES, -1))
    norm = parts.norm(dim=-1, keepdim=True)
    if counted is None:
        x, norm = parts.mean(3), norm.mean(3)
    else:
        votes = counted.unflatten(2, (SUBTILES, -1)).to(tiles.dtype)
        x, norm = ((z * votes).sum(3) / votes.sum(3).clamp(min=1) for z in (parts, norm))
    unit = scale / math.log(2)
    x, norm = (x * unit).flatten(1, 2), (norm * unit).flatten(1, 2)
    scores = likely_largest(x @ mean_y.mT, norm, radius, tiles.shape[3])
    scores = (scores - _log2_sum_exp2(scores)).unflatten(1, (-1, SUBTILES))
    if counted is not None:
        scores = scores.masked_fill(~counted.unflatten(2, (SUBTILES, -1)).any(3), -torch.inf)
    number = torch.arange(scores.shape[-1], device=scores.device)
    return best_first(scores.amax(2).masked_fill_(number < first, torch.inf), count)


def _log2_sum_exp2(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return largest + (x - largest).exp2_().sum(-1, keepdim=True).log2()


def radius_of(mean_square: Tensor, mean: Tensor) -> Tensor:
    """Root mean square distance `[...]` of keys to their mean, from the mean of their squared norms `[...]` and their
    mean `[..., D]`.
    """
    return (mean_square - mean.square().sum(-1)).clamp(min=0).sqrt()


def likely_largest(scores: Tensor, norm: Tensor, radius: Tensor, dim: int) -> Tensor:
    """Estimate the largest score `[..., Q, B]` of a query with the keys of a block from its score with the mean key.

    If keys are distributed isotropically, their scores have a standard deviation of ‖x‖ · radius / √D; the estimate is
    `DEVIATIONS` standard deviations above the mean. `norm` `[..., Q, 1]` of the queries; `radius` `[..., B]`, -inf for
    a block without keys.
    """
    return scores + norm.clamp(min=1e-30) * (radius * (DEVIATIONS / math.sqrt(dim))).unsqueeze(-2)


@torch.no_grad()
def choose_for_each(
    x: Tensor, rank: Tensor, scores: Tensor, radius: Tensor, sizes: CausalSizes
) -> tuple[Tensor, Tensor]:
    """Choose blocks for each causal query by the same rule. Returns its exact blocks `[B, K, R, t]` and a bias
    `[B, K, R, N]` for the means of all N blocks: the log of the number of keys, or -inf for exact and later blocks.

    Queries `[B, K, R, D]` include the scale; `rank` `[B, 1, R]` is the index of the last key each sees, -1 if none.
    `scores` `[B, K, R, N]` with the mean keys, `radius` `[B, K, N]`. The exact blocks are the first, the local and the
    chosen ones; for a query that sees fewer, they include blocks after its own, where it sees no key.
    """
    number = torch.arange(radius.shape[2], device=x.device)
    own = rank.div(sizes.block, rounding_mode="floor").unsqueeze(-1)  # block of the last key of each query
    bounds = likely_largest(scores, x.norm(dim=-1, keepdim=True), radius, x.shape[3])
    bounds = bounds.masked_fill_((number < sizes.first) | (number >= own - sizes.local), torch.inf)
    bounds = bounds.masked_fill_(number > own, -torch.inf)
    exact = best_first(bounds, min(sizes.first + sizes.chosen + sizes.local + 1, radius.shape[2]))
    far = torch.full_like(bounds, math.log(sizes.block)).masked_fill_(number > own, -torch.inf)
    return exact, far.scatter_(3, exact, -torch.inf)


@torch.no_grad()
def orders(x, y, x_seen, y_seen, sizes: Sizes, order: Order, scale: float, part: Any = None) -> tuple[Any, Any]:
    """Order of keys `[B, Hkv, Lk]` and queries `[B, H, Lq]` as positions, padding last; None if nothing moves.

    `x_seen` `[B, 1, Lq]` and `y_seen` `[B, 1, Lk]`: False for padding. With `part`, x and y are a process's part of a
    sharded sequence (`ops.sharded`), while the masks and the result cover the whole sequence.
    """
    (B, H), heads = x.shape[:2], y.shape[1]
    y_order, x_order = (None if s is None else by_position(s, B, n) for s, n in ((y_seen, heads), (x_seen, H)))
    if order == "position":
        return y_order, x_order
    x_moments, y_moments = moments(x, x_seen, part), moments(y, y_seen, part)
    content = torch.ones(B, heads, dtype=torch.bool, device=x.device)
    if order == "auto":
        content = prefers_content(x_moments[1], y_moments[1], scale)
        if x.is_cpu and not traced() and not content.any():  # reading it would synchronize a GPU
            return y_order, x_order

    def by_content(z: Tensor, seen: Tensor | None, z_moments: tuple[Tensor, Tensor], first: int) -> Tensor:
        which = content.repeat_interleave(z.shape[1] // heads, 1).unsqueeze(-1)
        number = torch.arange(z.shape[2], device=z.device) if seen is None else seen.long().cumsum(2) - 1
        which, code = which & (number >= first), number - number.shape[-1]
        if seen is not None:
            which, code = which & seen, code.masked_fill(~seen, 2**BITS)
        if part is not None:
            which, code = part.own(which, 2), part.own(code, 2)
        code = torch.where(which, content_code(z, *z_moments), code)
        return (code if part is None else part.whole(code.int(), 2)).argsort(dim=2, stable=True)

    return by_content(y, y_seen, y_moments, sizes.first * sizes.block), by_content(x, x_seen, x_moments, 0)


def by_position(seen: Tensor, batch: int, heads: int) -> Tensor:
    """Positions `[B, heads, L]` in their order, padding last; `seen` `[B or 1, 1, L]`."""
    return seen.long().argsort(dim=2, descending=True, stable=True).expand(batch, heads, -1)


def content_code(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Map each token `[..., L, D]` to a number `[..., L]`, such that tokens with similar numbers have similar content.

    The bits are the sides of the mean on which a token lies in the `BITS` coordinates of largest variance, read as a
    Gray code, so that consecutive numbers differ in one side. `mean` and `variance` `[..., D]`.
    """
    bits = min(BITS, x.shape[-1])
    largest = variance.argsort(dim=-1, descending=True, stable=True)[..., :bits].unsqueeze(-2)
    middle = mean + 1e-3 * variance.sqrt()  # not exactly the mean, with which rounded numbers may coincide
    sides = x.gather(-1, largest.expand(*x.shape[:-1], -1)) > middle.unsqueeze(-2).gather(-1, largest)
    weights = 2.0 ** torch.arange(bits - 1, -1, -1, device=x.device, dtype=x.dtype)
    gray = (sides.to(x.dtype) @ weights).to(torch.int32)
    for shift in (8, 4, 2, 1):
        gray = gray ^ (gray >> shift)
    return gray


def take(x: Tensor, order: Tensor | None) -> Tensor:
    """Reorder tokens `[B, H, L, D]` by a permutation `[B, H, L]`."""
    if order is None:
        return x
    if traced():
        return x.gather(2, order.unsqueeze(-1).expand_as(x))
    return _Permute.apply(x, order)


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation `[B, H, L]`."""
    at = torch.arange(order.shape[2], device=order.device).expand_as(order)
    return torch.zeros_like(order).scatter(2, order, at)


class _Permute(torch.autograd.Function):
    """Permutes rows with a fast backward; torch's own would accumulate gradients row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        B, H, L, D = x.shape
        start = torch.arange(B * H, device=x.device).view(B, H, 1) * L
        return x.reshape(-1, D).index_select(0, (order + start).flatten()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Permute.apply(grad, inverse(ctx.saved_tensors[0])), None


def prefers_content(x_variance: Tensor, y_variance: Tensor, scale: float) -> Tensor:
    """`[B, K]`, True for key heads whose tokens are better ordered by content than by position.

    The rule uses the variances of queries `[B, H, D]` and keys `[B, K, D]`. With a large spread, attention is sharp and
    mostly local, and neighbouring queries share their keys. With a small spread, attention is diffuse, and blocks of
    similar keys have better means. The spread is the geometric mean of both total variances, in units of the scores.
    """
    spread = x_variance.sum(-1).unflatten(1, (y_variance.shape[1], -1)).mean(-1)
    return (spread * y_variance.sum(-1)).sqrt() * scale < SPREAD


def moments(x: Tensor, seen: Tensor | None, part: Any = None) -> tuple[Tensor, Tensor]:
    """Mean and variance `[B, H, D]` of each coordinate over every `SAMPLE`-th token of `[B, H, L, D]` that is not
    padding; `seen` and `part` as in `orders`.
    """
    if seen is None:
        x = x[:, :, ::SAMPLE]
        mean, square = x.mean(2), x.square().mean(2)
    else:
        sampled = seen & (seen.long().cumsum(2) % SAMPLE == 1)
        x = x.masked_fill(~(sampled if part is None else part.own(sampled, 2)).unsqueeze(-1), 0)
        sums = torch.stack([x.sum(2), x.square().sum(2)])
        sums = sums if part is None else part.gather(sums).sum(0)
        mean, square = sums / sampled.sum(2, keepdim=True).clamp(min=1)
    return mean, (square - mean.square()).clamp(min=0)
