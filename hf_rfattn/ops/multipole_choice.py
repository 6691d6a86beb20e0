"""What multipole attention decides before it computes: the order of tokens and the blocks that stay exact.

All of it is constant to autograd, and shared by the fast operators and the naive definition. Hidden tokens never
count, and ties go to the token or block that comes first, so neither padding nor the way a sequence is cut into calls
changes a decision.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .tiles import traced

SUBTILES = 4  # votes of a tile: as good as one vote for each query, at a fraction of the cost
DEVIATIONS = 3.0  # above the mean score of a block: 2 and 4 choose nearly as well
SAMPLE = 4  # every so many tokens tell the variances of all
BITS = 16  # of the code of a token's content, at most 16
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
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats rise when they fall
    return bits.long().mul_(2**32).sub_(torch.arange(scores.shape[-1], device=scores.device))


@torch.no_grad()
def choose_blocks(
    tiles: Tensor, counted: Tensor | None, mean_y: Tensor, radius: Tensor, count: int, first: int, scale: float
) -> Tensor:
    """Numbers `[N, T, count]` of the blocks that each tile of queries sees exactly.

    `tiles` `[N, T, C, D]`; `counted` `[N, T, C, 1]` tells which of these queries vote. `mean_y` `[N, B, D]` and
    `radius` `[N, B]` of each block, see `radius_of`. The `first` blocks are always chosen, the others by
    `likely_largest`: each quarter of a tile votes with the softmax over blocks of its mean, and the largest vote
    counts. O(T · B · D).
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
    """Root of the mean squared distance of keys to their mean: `[...]`, from the mean of their squared norms `[...]`
    and their mean `[..., D]`.
    """
    return (mean_square - mean.square().sum(-1)).clamp(min=0).sqrt()


def likely_largest(scores: Tensor, norm: Tensor, radius: Tensor, dim: int) -> Tensor:
    """What the largest score of a query with a key of a block may be: `[..., Q, B]` from its score with the mean key.

    If the keys scatter alike in all directions, their scores have a standard deviation of ‖x‖ · radius / √D, and this
    is `DEVIATIONS` of them above the mean. `norm` `[..., Q, 1]` of the queries; `radius` `[..., B]`, -inf for a block
    without keys.
    """
    return scores + norm.clamp(min=1e-30) * (radius * (DEVIATIONS / math.sqrt(dim))).unsqueeze(-2)


@torch.no_grad()
def choose_for_each(
    x: Tensor, rank: Tensor, scores: Tensor, radius: Tensor, sizes: CausalSizes
) -> tuple[Tensor, Tensor]:
    """The choice of each causal query for itself, by the same rule: its exact blocks `[B, K, R, t]`, and a bias `[B,
    K, R, N]` for the means of all N blocks, the log of the number of keys of those that count as means, else -inf.

    Queries `[B, K, R, D]` carry the scale; each sees `rank` `[B, 1, R]` keys before the last one it sees, -1 if none.
    `scores` `[B, K, R, N]` with the mean keys, `radius` `[B, K, N]`. The exact blocks are the first, the local and the
    chosen ones; a query that sees fewer gets some that come after its own block, in which it sees no key.
    """
    number = torch.arange(radius.shape[2], device=x.device)
    own = rank.div(sizes.block, rounding_mode="floor").unsqueeze(-1)  # block of the last key that each query sees
    bounds = likely_largest(scores, x.norm(dim=-1, keepdim=True), radius, x.shape[3])
    bounds = bounds.masked_fill_((number < sizes.first) | (number >= own - sizes.local), torch.inf)
    bounds = bounds.masked_fill_(number > own, -torch.inf)
    exact = best_first(bounds, min(sizes.first + sizes.chosen + sizes.local + 1, radius.shape[2]))
    far = torch.full_like(bounds, math.log(sizes.block)).masked_fill_(number > own, -torch.inf)
    return exact, far.scatter_(3, exact, -torch.inf)


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
    x_moments, y_moments = (moments(z, seen) for z, seen in ((x, x_seen), (y, y_seen)))
    content = torch.ones(B, heads, dtype=torch.bool, device=x.device)
    if order == "auto":
        content = prefers_content(x_moments[1], y_moments[1], scale)
        if x.is_cpu and not traced() and not content.any():  # a GPU would have to be waited for
            return y_order, x_order

    def by_content(z, seen, z_moments, before, first: int) -> Tensor:
        which = content.repeat_interleave(z.shape[1] // heads, 1).unsqueeze(-1)
        number = torch.arange(z.shape[2], device=z.device)
        code = torch.where(which & (number >= first), content_code(z, *z_moments), number - z.shape[2])
        if seen is not None:
            code = code.masked_fill(~seen, 2**BITS)
        found = code.argsort(dim=2, stable=True)
        return found if before is None else before.gather(2, found)

    first = sizes.first * sizes.block
    return by_content(y, y_seen, y_moments, y_order, first), by_content(x, x_seen, x_moments, x_order, 0)


def content_code(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """A number `[..., L]` for each token `[..., L, D]`; tokens with similar numbers are near in content.

    It tells on which side of the mean a token lies in the `BITS` coordinates of the largest variance, read as a Gray
    code: tokens with consecutive numbers differ in one side. `mean` and `variance` `[..., D]`.
    """
    bits = min(BITS, x.shape[-1])
    largest = variance.argsort(dim=-1, descending=True, stable=True)[..., :bits].unsqueeze(-2)
    middle = mean + 1e-3 * variance.sqrt()  # not just the mean, at which rounded numbers may lie
    sides = x.gather(-1, largest.expand(*x.shape[:-1], -1)) > middle.unsqueeze(-2).gather(-1, largest)
    weights = 2.0 ** torch.arange(bits - 1, -1, -1, device=x.device, dtype=x.dtype)
    gray = (sides.to(x.dtype) @ weights).to(torch.int32)
    for shift in (8, 4, 2, 1):
        gray = gray ^ (gray >> shift)
    return gray


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


def prefers_content(x_variance: Tensor, y_variance: Tensor, scale: float) -> Tensor:
    """`[B, K]`, True for key heads whose tokens are better ordered by content than by position.

    By the variances of queries `[B, H, D]` and keys `[B, K, D]`. Where they spread widely, scores are sharp and mostly
    local, and neighbours in the text share their keys. Where they spread little, attention is diffuse, and blocks of
    similar keys have better means. The spread is the geometric mean of both total variances, in units of the scores.
    """
    spread = x_variance.sum(-1).unflatten(1, (y_variance.shape[1], -1)).mean(-1)
    return (spread * y_variance.sum(-1)).sqrt() * scale < SPREAD


def moments(x: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance `[..., D]` of each coordinate of tokens `[..., L, D]`, of every `SAMPLE`-th of them; `seen`
    `[..., L]`: those that count.
    """
    x = x[..., ::SAMPLE, :]
    if seen is None:
        mean, square = x.mean(-2), x.square().mean(-2)
    else:
        seen = seen[..., ::SAMPLE]
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        x = x.masked_fill(~seen.unsqueeze(-1), 0)
        mean, square = x.sum(-2) / count, x.square().sum(-2) / count
    return mean, (square - mean.square()).clamp(min=0)
