"""Exact softmax attention where it is cheap: within a band around the diagonal, and to and from a few global tokens.

Both are linear in L. A band never becomes a dense masked matrix: queries come in tiles, each with the keys of its own
and the neighbouring tiles that the band reaches into.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from .autograd import differentiate, gradients_of, keep, kept, traced
from .linear import blocks, compute_dtype
from .masks import global_keys, positions_of
from .softmax import attend, softmax_of_scores
from .tiles import from_tiles, into_tiles, traced_filling, windows

TILES = (32, 64, 128)  # positions a tile: small ones waste little of a narrow band


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bandwidth: int,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention `[B, H, Lq, Dv]` over the keys at distance `bandwidth` or less, and its lse `[B, H, Lq, 1]`.

    Keys `[B, Hkv, Lk, D]` and values `[B, Hkv, Lk, Dv]` may be more than queries `[B, H, Lq, D]`: the last query stands
    at the last key. `key_mask` `[B, Lk]`: True for keys that exist. `segments` `[B, L]`: numbers of packed sequences. A
    query that sees no key has out = 0 and lse = -inf. O(Lq · bandwidth · D) time, O(L · D) memory.
    """
    arguments = q, k, v, _Band.of(q, k, bandwidth, scale, causal), key_mask, segments
    found = differentiate(_BandedAttention, *arguments)
    return _attention(*arguments) if found is None else found


class _Band(NamedTuple):
    """A band in tiles of `size` positions, `left` and `right` of which it reaches into."""

    bandwidth: int
    scale: float
    causal: bool
    size: int
    left: int
    right: int
    ahead: int  # the first query stands at this key

    @staticmethod
    def of(q: Tensor, k: Tensor, bandwidth: int, scale: float, causal: bool) -> "_Band":
        size = next((size for size in TILES if bandwidth <= size), TILES[-1])
        if not traced():  # a compiler would have to compile again for another length
            size = min(size, q.shape[2])
            bandwidth = min(bandwidth, k.shape[2])
        left = -(-bandwidth // size)
        return _Band(bandwidth, scale, causal, size, left, 0 if causal else left, k.shape[2] - q.shape[2])

    def blocks(self, q: Tensor) -> list[slice]:
        B, H, L, D = q.shape
        width = (self.left + 1 + self.right) * self.size
        return blocks(L, B * H * max(D, width), self.size, q.device, self.size)

    def around(self, rows: slice) -> tuple[int, int]:
        """The keys of whole tiles that a block of queries needs: from, to; beyond both ends of the sequence too."""
        length = rows.stop - rows.start
        count = self.right * self.size + (
            length + traced_filling(self.size) if traced() else -(-length // self.size) * self.size
        )
        start = rows.start + self.ahead
        return start - self.left * self.size, start + count

    def windows(self, x: Tensor) -> Tensor:
        return windows(x, self.size, self.left, self.right)


def _attention(q, k, v, band, key_mask, segments) -> tuple[Tensor, Tensor]:
    parts = [_attend_block(*_block(rows, q, k, v, band, key_mask, segments)) for rows in band.blocks(q)]
    return parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2))


def _block(rows: slice, q, k, v, band, key_mask, segments) -> tuple[Any, ...]:
    """What some queries need: they, the keys and values around them, and which of these exist."""
    start, stop = band.around(rows)
    visible = key_mask
    if visible is None and (traced() or start < 0 or stop > k.shape[2]):
        visible = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
    if visible is not None:
        visible = _cut(visible[:, None, :, None], start, stop)
    if segments is not None:
        segments = segments[:, None, rows, None], _cut(segments[:, None, :, None], start, stop)
    return q[:, :, rows], _cut(k, start, stop), _cut(v, start, stop), band, visible, segments


def _cut(x: Tensor, start: int, stop: int) -> Tensor:
    """A part of dimension 2, with zeros for what lies beyond its ends."""
    length = x.shape[2]
    if traced():  # all of it, and always more behind it
        return F.pad(x[:, :, max(start, 0) :], (0, 0, max(-start, 0), stop - length))
    inside = x[:, :, max(start, 0) : min(stop, length)]
    before, after = max(-start, 0), max(stop - length, 0)
    return F.pad(inside, (0, 0, before, after)) if before or after else inside


def _attend_block(x, y, u, band, visible, segments) -> tuple[Tensor, Tensor]:
    dtype, L, kv_heads = compute_dtype(x), x.shape[2], y.shape[1]
    tiles = into_tiles(x.to(dtype) * band.scale, band.size)
    tiles = tiles.unflatten(1, (kv_heads, -1)).transpose(2, 3)  # [B, Hkv, T, G, C, D]
    scores = tiles.flatten(3, 4) @ band.windows(y.to(dtype)).mT
    scores = scores.unflatten(3, (-1, band.size)).masked_fill(~_allowed(band, visible, segments, x.device), -torch.inf)
    out, lse = softmax_of_scores(scores.flatten(3, 4), band.windows(u.to(dtype)))
    out, lse = (from_tiles(z.unflatten(3, (-1, band.size)).transpose(2, 3).flatten(1, 2), L) for z in (out, lse))
    return out.to(x.dtype), lse


def _allowed(band: _Band, visible: Tensor | None, segments: tuple[Tensor, Tensor] | None, device: Any) -> Tensor:
    """Which pairs count: `[B or 1, 1, T or 1, 1, C, (left + 1 + right) · C]`."""
    a = torch.arange(band.size, device=device)[:, None]
    b = torch.arange((band.left + 1 + band.right) * band.size, device=device)
    distance = band.left * band.size + a - b
    allowed = (distance.abs() <= band.bandwidth) & (distance >= 0 if band.causal else True)
    if visible is not None:
        allowed = allowed & band.windows(visible).mT
    if segments is not None:
        allowed = allowed & (into_tiles(segments[0], band.size) == band.windows(segments[1]).mT)
    return allowed.expand(1, 1, 1, *allowed.shape).unsqueeze(3) if allowed.ndim == 2 else allowed.unsqueeze(3)


class _BandedAttention(torch.autograd.Function):
    """Scores of a block are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Any:
        keep(ctx, spec, leaves)
        return _attention(*tree_unflatten(leaves, spec))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        arguments, _ = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, gradients)
        q, k, v, band, key_mask, segments = arguments
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=compute_dtype(x)) for x in (k, v))
        for rows in band.blocks(q):
            *tensors, _, visible, pair = _block(rows, q, k, v, band, key_mask, segments)
            block = *(x.detach().requires_grad_() for x in tensors), band, visible, pair
            found: Any = gradients_of(_attend_block, block, [g[:, :, rows] for g in gradients])
            dq[:, :, rows] = found[0]
            start, stop = band.around(rows)
            here = slice(max(start, 0), min(stop, k.shape[2]))
            for total, new in ((dk, found[1]), (dv, found[2])):
                total[:, :, here] += new[:, :, here.start - start : here.stop - start]
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), *[None] * (len(band) + 2)


def global_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    bandwidth: int,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    causal: bool = False,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the global keys of its sequence that lie outside the band, and its lse.

    There are at most `count` of them at each end of a sequence (`masks.global_keys`). O(L · count · D).
    """
    (B, H, L, D), K, dtype = q.shape, k.shape[1], compute_dtype(q)
    chosen = global_keys(L, count, key_mask, causal, segments, q.device).expand(B, L)
    index = positions_of(chosen, count if causal else 2 * count, segments)  # [B, L or 1, N]
    distance = torch.arange(L, device=q.device)[None, :, None] - index
    present = (index >= 0) & (distance.abs() > bandwidth)
    if causal:
        present = present & (distance >= 0)
    flat = index.clamp(min=0).flatten(1)[:, None, :, None]
    y, u = (z.gather(2, flat.expand(-1, K, -1, z.shape[-1])).to(dtype) for z in (k, v))  # [B, K, L · N or N, E]
    if segments is None:
        return attend(q.to(dtype), y, u, bias_of(present[:, None], dtype), scale)
    y, u = (z.view(B, K, 1, L, -1, z.shape[-1]) for z in (y, u))
    x = (q.to(dtype) * scale).reshape(B, K, H // K, L, 1, D)
    scores = (x * y).sum(-1).masked_fill(~present[:, None, None], -torch.inf)  # [B, K, G, L, N]
    out, lse = softmax_of_scores(scores.unsqueeze(-2), u)
    return tuple(z.reshape(B, H, L, -1) for z in (out, lse))  # type: ignore[return-value]


def bias_of(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where True, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def with_global_rows(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    last: bool = True,
) -> Tensor:
    """The same output `[B, H, L, D]`, with softmax over all keys in the rows of global tokens: the first `count` and,
    unless `last` is False, the last. O(count · L · D).

    For bidirectional attention: causal global tokens, at the start of a sequence, see hardly any others.
    """
    B, H, L, D = out.shape
    dtype = compute_dtype(q)
    chosen = global_keys(L, count, key_mask, not last, None, out.device).expand(B, L)
    index = positions_of(chosen, (1 + last) * count, None)[:, 0]  # [B, N]
    there, index = index >= 0, index.clamp(min=0)
    bias = None if key_mask is None else bias_of(key_mask[:, None, None], dtype)
    at = index[:, None, :, None]
    x = q.gather(2, at.expand(-1, H, -1, q.shape[-1])).to(dtype)
    rows = attend(x, k.to(dtype), v.to(dtype), bias, scale)[0].to(out.dtype)
    rows = rows.masked_fill(~there[:, None, :, None], 0)
    return out.masked_fill(chosen[:, None, :, None], 0).scatter_add(2, at.expand(-1, H, -1, D), rows)
