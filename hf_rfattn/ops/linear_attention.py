"""Linear attention, out_i = φ(x_i)ᵀ Σ_j φ(y_j) v_jᵀ / φ(x_i)ᵀ Σ_j φ(y_j): its sums, and its pairs within tiles.

Features come as logarithms, so that nothing overflows. Three offsets keep every sum near one: each running state holds,
*for each feature*, the largest log-feature it has seen, so that the feature that matters most to a query is never lost;
inside a tile each key is scaled by its own largest log-feature c_j; and each query by the largest scale among the
states and keys it sees. Neither padding nor the future enters any of them. No epsilon anywhere. Offsets are constants
to autograd: they cancel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .partial import Partial, exp_less
from .scratch import fresh, may_overwrite, product
from .tiles import neighbourhood

TILE = 64  # positions whose pairs are computed one by one where order matters


class Features(NamedTuple):
    """φ = factor · exp(log). Positive maps give `log` alone; signed ones a bounded `factor` and one `log` a token."""

    log: Tensor  # [B, H, L, M] or [B, H, L, 1]
    factor: Tensor | None = None  # [B, H, L, M]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """The same function on both tensors: to cut, pad or reshape positions."""
        return Features(function(self.log), None if self.factor is None else function(self.factor))

    def dense(self) -> Tensor:
        """φ itself, `[B, H, L, M]`: exact only where it does not overflow."""
        return self.log.exp() if self.factor is None else self.log.exp() * self.factor

    def divided(self, offset: Tensor, *, reuse: bool = False) -> Tensor:
        """φ / exp(offset); `reuse` for the last use of these features."""
        scaled = exp_less(self.log, offset, reuse=reuse)
        return scaled if self.factor is None else scaled * self.factor

    def raised(self, by: Tensor, *, reuse: bool = False) -> "Features":
        """φ · exp(by); `reuse` for the last use of these features."""
        reuse = reuse and may_overwrite()
        return self._replace(log=torch.add(self.log, by, out=self.log if reuse else fresh(self.log.shape, self.log)))

    def largest(self, dim: int) -> Tensor:
        """Of the logarithms along a dimension, which is kept: an offset."""
        return self.log.detach().amax(dim=dim, keepdim=True)

    def only(self, visible: Tensor) -> "Features":
        """φ = 0 in all rows but the `visible` ones `[…, L, 1]`: these neither count nor enter an offset."""
        shown = visible.to(self.log.dtype)
        return Features(self.log + shown.log(), None if self.factor is None else self.factor * shown)


class State(NamedTuple):
    """Sums over keys, S = Σ φ(k_j) v_jᵀ and z = Σ φ(k_j), as exp(log_scale) · (outer, total), with a scale for each
    feature.

    This is all that a query needs to know of any number of keys: the whole state of generation.
    """

    log_scale: Tensor  # [..., 1, M] or [..., 1, 1]
    outer: Tensor  # [..., M, D]
    total: Tensor  # [..., M, 1]

    @staticmethod
    def empty(*batch: int, features: int, scales: int, value_dim: int, like: Tensor) -> "State":
        """Of no keys, with `batch` dimensions, `like` another tensor in dtype and device."""
        return State(
            like.new_full((*batch, 1, scales), -torch.inf),
            like.new_zeros(*batch, features, value_dim),
            like.new_zeros(*batch, features, 1),
        )


def linear_multiply_adds(length: int, features: int, value_dim: int, causal: bool, outside: int | None = None) -> int:
    """Multiply-adds of linear attention for one head, features given: the sums, and the pairs within tiles if there
    are any.
    """
    sums = 2 * length * features * (value_dim + 1)
    if not causal and outside is None:
        return sums
    reach = -(-(outside or 0) // TILE)
    neighbours = min(length, TILE * (1 + reach * (1 if causal else 2)))
    return sums + length * neighbours * (features + value_dim)


def sum_keys(k: Features, v: Tensor) -> State:
    """The state of keys `[..., L, M]`. Hidden ones have log = -inf. Values may be bfloat16 for positive features."""
    scale = k.largest(-2)
    phi = k.divided(scale, reuse=True)
    outer = (phi.to(v.dtype).transpose(-1, -2) @ v).to(phi.dtype)
    return State(scale, outer, phi.sum(-2).unsqueeze(-1))


def combine(a: State, b: State) -> State:
    """The state that holds the keys of both; without gradients it takes the place of the first."""
    x, y = a.log_scale.detach(), b.log_scale.detach()
    scale = torch.maximum(x, y)
    x, y = (exp_less(s, scale).transpose(-1, -2) for s in (x, y))
    reuse = may_overwrite()
    outer, total = (torch.mul(s, x, out=s if reuse else None) for s in (a.outer, a.total))
    return State(scale, torch.addcmul(outer, y, b.outer), torch.addcmul(total, y, b.total))


def add_key(state: State, k: Features, v: Tensor) -> None:
    """One more key `[B, Hkv, 1, M]`, in place: a step of generation."""
    scale = torch.maximum(state.log_scale, k.log)
    decay, phi = exp_less(state.log_scale, scale).transpose(-1, -2), k.divided(scale).transpose(-1, -2)
    state.outer.mul_(decay).addcmul_(phi, v)
    state.total.mul_(decay).add_(phi)
    state.log_scale.copy_(scale)


def read_state(q: Features, state: State) -> Partial:
    """What queries `[B, H, L, M]` see of a state `[B, Hkv, …]`: the largest term of each denominator is 1 for positive
    features.
    """
    B, H, L = q.log.shape[:3]
    K = state.outer.shape[1]
    if K != H:
        q = q.map(lambda x: x.reshape(B, K, -1, x.shape[-1]))
    q = q.raised(state.log_scale, reuse=True)
    scale = q.largest(-1)
    phi = q.divided(scale, reuse=True)
    part = product(phi, state.outer), _dot(phi, state.total), scale
    return Partial(*(x.reshape(B, H, L, -1) for x in part) if K != H else part)


def _dot(phi: Tensor, total: Tensor) -> Tensor:
    """`phi @ total` for a single column, which libraries for matrices compute at a fraction of their speed."""
    return torch.mul(phi, total.transpose(-1, -2), out=fresh(phi.shape, phi)).sum(-1, keepdim=True)


def running_states(
    k: Features, v: Tensor, carry: State, ended: Tensor | None = None, backward: bool = False
) -> tuple[State, State]:
    """The state before each tile of keys `[B, Hkv, T, C, …]` (after it, if `backward`), and the one after all of them.

    `carry` is what came before the first. `ended` `[B, 1, T, 1, 1]` is True for tiles that begin with an empty state.
    """
    scales, joined, decay = running_scales(k, carry.log_scale, ended, backward)
    phi = k.divided(joined)
    outer, total = product(phi.transpose(-1, -2), v), phi.sum(-2).unsqueeze(-1)
    decay = decay.transpose(-1, -2)
    outers, last_outer = decayed_sums(outer, decay, carry.outer, backward)
    totals, last_total = decayed_sums(total, decay, carry.total, backward)
    last = joined[:, :, 0 if backward else -1].clone()
    return State(scales, outers, totals), State(last, last_outer, last_total)


def running_scales(
    k: Features, carry: Tensor, ended: Tensor | None = None, backward: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale of the state before each tile of keys and of the one after it, and by how much the first shrinks to
    become part of the second: `[B, Hkv, T, 1, M]`.
    """
    step = -1 if backward else 1
    scale = k.largest(-2).unbind(2)
    largest = carry.detach()
    before, after = [], []  # small tensors
    for t in range(len(scale))[::step]:
        before.append(largest)
        kept = largest if ended is None else largest.masked_fill(ended[:, :, t], -torch.inf)
        largest = torch.maximum(kept, scale[t])
        after.append(largest)
    scales, joined = (torch.stack(x[::step], dim=2) for x in (before, after))
    decay = exp_less(scales, joined)
    return scales, joined, decay if ended is None else decay.masked_fill(ended, 0)


def decayed_sums(terms: Tensor, decay: Tensor, start: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """s ← terms_t + decay_t · s along dimension 2: the sum before each step, and the one after all of them."""
    step = -1 if backward else 1
    steps = list(zip(terms.unbind(2), decay.unbind(2), strict=True))[::step]
    if not may_overwrite():
        sums = [start]
        for term, factor in steps:
            sums.append(torch.addcmul(term, factor, sums[-1]))
        last = sums.pop()
        return torch.stack(sums[::step], dim=2), last
    before = fresh(terms.shape, terms)
    before = torch.empty_like(terms) if before is None else before
    last = torch.empty_like(start)
    places = [*before.unbind(2)[::step], last]
    places[0].copy_(start)
    for (term, factor), sum_before, sum_after in zip(steps, places[:-1], places[1:], strict=True):
        torch.addcmul(term, factor, sum_before, out=sum_after)
    return before, last


def attend_tiles(
    q: Features,
    k: Features,
    v: Tensor,
    allowed: Tensor,
    left: int,
    right: int,
    beyond: list[tuple[State, Tensor | None]],
) -> Partial:
    """Queries `[B, Hkv, T, G·C, …]` over the `allowed` keys of their neighbourhood, pair by pair, and over all that
    lies `beyond`: states `[B, Hkv, T, …]`, each with the queries that may read it, if not all.
    """
    groups = q.log.shape[3] // allowed.shape[3]
    q_scale, k_scale = q.largest(-1), k.largest(-1)
    shape = (*v.shape[:2], q.log.shape[2], allowed.shape[3], allowed.shape[4])
    pair_scale = neighbourhood(k_scale, left, right).transpose(-1, -2)  # c_j
    pair_scale = torch.add(pair_scale, allowed.to(v.dtype).log(), out=fresh(shape, v))
    scale = repeat_rows(pair_scale.amax(-1, keepdim=True), groups) + q_scale
    reads = []
    for state, mine in beyond:
        read = q.raised(state.log_scale)
        reads.append(read if mine is None else read.only(repeat_rows(mine, groups)))
        scale = torch.maximum(scale, reads[-1].largest(-1))

    offsets = exp_less(repeat_rows(pair_scale, groups), scale - q_scale, reuse=True)
    phi, psi = q.divided(q_scale, reuse=True), neighbourhood(k.divided(k_scale, reuse=True), left, right)
    weights = product(phi, psi.transpose(-1, -2)).mul_(offsets)
    numerator, denominator = product(weights, neighbourhood(v, left, right)), weights.sum(-1, keepdim=True)
    for read, (state, _) in zip(reads, beyond, strict=True):
        phi = read.divided(scale, reuse=True)
        numerator = product(phi, state.outer, numerator)
        denominator = denominator + _dot(phi, state.total)
    return Partial(numerator, denominator, scale)


def repeat_rows(x: Tensor, groups: int) -> Tensor:
    """Rows of a tile once for each query head that shares its keys."""
    return x if groups == 1 else x.repeat(1, 1, 1, groups, 1)
