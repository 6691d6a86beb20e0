"""Linear attention, out_i = φ(x_i)ᵀ Σ_j φ(y_j) v_jᵀ / φ(x_i)ᵀ Σ_j φ(y_j), bidirectional or causal, in linear time.

Features come as logarithms, so that nothing overflows. Three offsets keep every sum near one (DESIGN: "numbers that
stay true"): each key tile and the running state hold, *for each feature*, the largest log-feature they have seen, so
that the feature that matters most to a query is never lost; inside a tile each key is scaled by its own largest
log-feature and the pair (i, j) weighs exp(c_j - m_i) with m_i the largest c_j visible to i. Neither padding nor the
future enters any of them. No epsilon anywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .partial import Partial, finite, merge
from .tiles import into_tiles, neighbourhood, pairs, queries_from_tiles, queries_into_tiles, visible_tiles

TILE = 64


class Features(NamedTuple):
    """φ = factor · exp(log). Positive maps give `log` alone; signed ones a bounded `factor` and one `log` a token."""

    log: Tensor  # [B, H, L, M] or [B, H, L, 1]
    factor: Tensor | None = None  # [B, H, L, M]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """The same function on both tensors: to cut, pad or reshape positions."""
        return Features(function(self.log), None if self.factor is None else function(self.factor))

    def dense(self) -> Tensor:
        """φ itself, `[B, H, L, M]`: exact only where it does not overflow."""
        return _scaled(self, torch.zeros_like(self.log))


class State(NamedTuple):
    """Sums over keys, S = Σ φ(k_j) v_jᵀ and z = Σ φ(k_j), as exp(log_scale) · (outer, total), with a scale for each
    feature.

    This is all that a query needs to know of any number of keys: the whole state of generation.
    """

    log_scale: Tensor  # [..., 1, M] or [..., 1, 1]
    outer: Tensor  # [..., M, D]
    total: Tensor  # [..., M, 1]


def linear_attention(
    q: Features,
    k: Features,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
    outside: int | None = None,
) -> Partial:
    """Attention with weights φ(q_i)ᵀφ(k_j) over the visible keys, not yet normalised.

    `key_mask` `[B, L]` is True for keys that exist; `segments` `[B, L]` numbers packed sequences, which must be
    contiguous; `outside=W` leaves out the keys at distance W or less (a near field computes those exactly).

    >>> ones = Features(torch.zeros(1, 1, 4, 1))
    >>> v = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 4, 1)
    >>> partial = linear_attention(ones, ones, v, causal=True)
    >>> (partial.numerator / partial.denominator).flatten()
    tensor([1.0000, 1.5000, 2.0000, 3.0000])
    """
    if causal or segments is not None or outside is not None:
        return _tiled(q, k, v, key_mask, causal, segments, outside)
    return read_state(q, summarise(k, v, key_mask))


def _scaled(features: Features, offset: Tensor) -> Tensor:
    """φ / exp(offset); the offset is a constant to autograd, since it cancels wherever it is used."""
    scaled = torch.exp(features.log - finite(offset))
    return scaled if features.factor is None else features.factor * scaled


def _largest(log: Tensor, dim: int) -> Tensor:
    return log.detach().amax(dim=dim, keepdim=True)


def linear_multiply_adds(length: int, features: int, value_dim: int, causal: bool, outside: int | None = None) -> int:
    """Multiply-adds of `linear_attention` for one head, features given: the sums, and the pairs within tiles if there
    are any.
    """
    sums = 2 * length * features * (value_dim + 1)
    if not causal and outside is None:
        return sums
    reach = -(-(outside or 0) // TILE)
    neighbours = min(length, TILE * (1 + reach * (1 if causal else 2)))
    return sums + length * neighbours * (features + value_dim)


def summarise(k: Features, v: Tensor, key_mask: Tensor | None = None) -> State:
    """The state that holds all visible keys `[B, Hkv, L, M]`."""
    if key_mask is not None:
        k = Features(k.log.masked_fill(~key_mask[:, None, :, None], -torch.inf), k.factor)
    return _sum_keys(k, v)


def combine(a: State, b: State) -> State:
    """The state that holds the keys of both."""
    scale = torch.maximum(a.log_scale, b.log_scale)
    x, y = (torch.exp(s.log_scale - finite(scale)).transpose(-1, -2) for s in (a, b))
    return State(scale, x * a.outer + y * b.outer, x * a.total + y * b.total)


def read_state(q: Features, state: State) -> Partial:
    """What queries `[B, H, L, M]` see of a state `[B, Hkv, …]`."""
    B, H, L = q.log.shape[:3]
    grouped = q.map(lambda x: x.reshape(B, state.outer.shape[1], -1, x.shape[-1]))
    return Partial(*(x.reshape(B, H, L, -1) for x in _read(grouped, state)))


def _sum_keys(k: Features, v: Tensor) -> State:
    """Sum over the last but one dimension. Hidden keys have log = -inf."""
    scale = _largest(k.log, -2)
    phi = _scaled(k, scale)
    return State(scale, phi.transpose(-1, -2) @ v, phi.sum(-2).unsqueeze(-1))


def _read(q: Features, state: State) -> Partial:
    """Queries `[..., L, M]` of a state: the largest term of each denominator is 1 for positive features."""
    log = q.log + state.log_scale
    scale = _largest(log, -1)
    phi = _scaled(Features(log, q.factor), scale)
    return Partial(phi @ state.outer, phi @ state.total, scale)


def _tiled(
    q: Features,
    k: Features,
    v: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    segments: Tensor | None,
    outside: int | None,
) -> Partial:
    """Pairs within a neighbourhood of tiles one by one; all that lies before (and after) it through its sums."""
    B, K, L, _ = v.shape
    H = q.log.shape[1]
    visible = visible_tiles(key_mask, B, L, TILE, v.device)
    k = k.map(lambda x: into_tiles(x, TILE))
    k = Features(k.log.masked_fill(~visible, -torch.inf), k.factor)
    v = into_tiles(v, TILE)
    q = q.map(lambda x: queries_into_tiles(x, TILE, K))
    tile_segments = None if segments is None else into_tiles(segments[:, None, :, None], TILE)

    tiles = v.shape[2]
    left = min(-(-(outside or 0) // TILE), tiles - 1)
    right = 0 if causal else left
    allowed = pairs(visible, tile_segments, left, right, causal, (None, outside))
    parts = [_pairwise(q, k, v, allowed, left, right), _read_beyond(q, k, v, tile_segments, left, backward=False)]
    if not causal:
        parts.append(_read_beyond(q, k, v, tile_segments, right, backward=True))
    return Partial(*(queries_from_tiles(x, H, L) for x in merge(*parts)))


def _pairwise(q: Features, k: Features, v: Tensor, allowed: Tensor, left: int, right: int) -> Partial:
    """φ(q_i)ᵀφ(k_j) pair by pair within the neighbourhood of each tile."""
    q_scale, k_scale = _largest(q.log, -1), _largest(k.log, -1)
    weights = _scaled(q, q_scale) @ neighbourhood(_scaled(k, k_scale), left, right).transpose(-1, -2)
    scale = neighbourhood(k_scale, left, right, fill=-torch.inf).transpose(-1, -2).masked_fill(~allowed, -torch.inf)
    m = _largest(scale, -1)
    groups = weights.shape[3] // allowed.shape[3]
    weights = weights.unflatten(3, (groups, -1)) * torch.exp(scale - finite(m)).unsqueeze(3)
    weights = weights.flatten(3, 4)
    log_scale = m.repeat(1, 1, 1, groups, 1) + q_scale
    return Partial(weights @ neighbourhood(v, left, right), weights.sum(-1, keepdim=True), log_scale)


def _read_beyond(q: Features, k: Features, v: Tensor, segments: Tensor | None, lag: int, backward: bool) -> Partial:
    """What each tile sees of all tiles more than `lag` before it (after it, if `backward`)."""
    edges = None  # [B, 1, T, 1, 1]: beyond a tile reaches only the segment of its last (first) position
    if segments is not None:
        edges = segments[:, :, :, 0 if backward else -1, None]
        k = Features(k.log.masked_fill(segments != edges, -torch.inf), k.factor)
    sums = _sum_keys(k, v)
    tiles, step = v.shape[2], -1 if backward else 1
    state = State(*(torch.zeros_like(x[:, :, 0]) for x in sums))
    state = state._replace(log_scale=torch.full_like(state.log_scale, -torch.inf))
    states: list[State] = []
    for t in range(tiles)[::step]:
        states.append(state)
        if edges is not None and len(states) > 1:
            ended = edges[:, :, t - step] != edges[:, :, t]
            state = state._replace(log_scale=state.log_scale.masked_fill(ended, -torch.inf))
        state = combine(state, State(*(x[:, :, t] for x in sums)))
    states = ([states[0]] * lag + states[: tiles - lag])[::step]
    part = _read(q, State(*(torch.stack(x, dim=2) for x in zip(*states, strict=True))))
    if segments is not None and edges is not None:
        owners = edges.roll(step * (lag + 1), dims=2)  # what wraps around is empty
        foreign = (segments != owners).repeat(1, 1, 1, part.log_scale.shape[3] // segments.shape[3], 1)
        part = part._replace(log_scale=part.log_scale.masked_fill(foreign, -torch.inf))
    return part
