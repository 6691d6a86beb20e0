"""Exact softmax attention where it is cheap: within a band around the diagonal, and to and from a few global tokens.

Both are linear in L. A band never becomes a dense masked matrix: queries come in tiles, each with the keys of its own
and the neighbouring tiles that the band reaches into.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from . import backend, fused
from .autograd import differentiate, gradients_of, keep, kept
from .linear import State, compute_dtype
from .masks import global_keys, positions_of
from .softmax import attend, merge, softmax_of_scores
from .tiles import block_size, from_tiles, into_tiles, traced, traced_filling, windows

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
    """out_i = Σ_{|i-j|≤W} exp(scale · q_iᵀk_j - lse_i) v_j, `[B, H, Lq, Dv]`, and lse `[B, H, Lq, 1]`, W = `bandwidth`.

    Keys `[B, Hkv, Lk, D]` and values `[B, Hkv, Lk, Dv]` may be more than queries `[B, H, Lq, D]`: the last query stands
    at the last key. `key_mask` `[B, Lk]`: True for keys that exist. `segments` `[B, L]`: numbers of packed sequences. A
    query that sees no key has out = 0 and lse = -inf. O(Lq · bandwidth · D) time, O(L · D) memory.
    """
    this = partial(banded_attention, bandwidth=bandwidth, scale=scale, causal=causal)
    if q.device.type in backend.DEVICES and backend.fused("band", this, (q, k, v)):
        return fused.banded_attention(q, k, v, bandwidth, scale, key_mask, causal, segments)
    for size in TILES:
        if bandwidth <= size:
            break
    if not traced():  # a compiler would have to compile again for another length
        size, bandwidth = min(size, q.shape[2]), min(bandwidth, k.shape[2])
    reach = -(-bandwidth // size)
    width = (1 + reach + (0 if causal else reach)) * size
    band = _Band(bandwidth, scale, causal, size, reach, width, k.shape[2] - q.shape[2])
    arguments = q, k, v, band, key_mask, None if segments is None else (segments, segments)
    if torch.is_grad_enabled() and (found := differentiate(_BandedAttention, *arguments)) is not None:
        return found
    return _attention(*arguments)


class _Band(NamedTuple):
    """A band in tiles of `size` positions, `reach` of which it reaches into on each side."""

    bandwidth: int
    scale: float
    causal: bool
    size: int
    reach: int
    width: int  # keys of a tile and of those around it
    ahead: int  # the first query stands at this key

    def around(self, rows: slice) -> tuple[int, int]:
        """The keys of whole tiles that a block of queries needs: from, to; beyond both ends of the sequence too."""
        length, left = rows.stop - rows.start, self.reach * self.size
        count = length + traced_filling(self.size) if traced() else -(-length // self.size) * self.size
        start = rows.start + self.ahead - left
        return start, start + count + self.width - self.size


def _attention(q, k, v, band, key_mask, segments) -> tuple[Tensor, Tensor]:
    size, length = block_size(q, band.width, least=band.size, multiple=band.size), q.shape[2]
    if size >= length:
        return _attend_block(slice(0, length), q, k, v, band, key_mask, segments)
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(*q.shape[:3], 1, dtype=compute_dtype(q))
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        out[:, :, rows], lse[:, :, rows] = _attend_block(rows, q, k, v, band, key_mask, segments)
    return out, lse


def _attend_block(rows: slice, q, k, v, band, key_mask, segments) -> tuple[Tensor, Tensor]:
    """Attention of some queries, and its lse."""
    kv_heads, size, (start, stop) = k.shape[1], band.size, band.around(rows)
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = into_tiles(q[:, :, rows].to(dtype) * band.scale, size, kv_heads)  # [B, Hkv, T, G · C, D]
    y = windows(k, start, stop, size, band.width).to(dtype)  # [B, Hkv, T, W, E]
    u = windows(v, start, stop, size, band.width).to(dtype)
    a = torch.arange(size, device=q.device)[:, None]
    distance = band.reach * size + a - torch.arange(band.width, device=q.device)
    allowed = (distance.abs() <= band.bandwidth) & (distance >= 0 if band.causal else True)
    if key_mask is None and (traced() or start < 0 or stop > k.shape[2]):
        key_mask = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
    if key_mask is not None:
        allowed = allowed & windows(key_mask[:, None, :, None], start, stop, size, band.width).mT
    if segments is not None:
        own = into_tiles(segments[0][:, None, rows, None], size, 1)
        allowed = allowed & (own == windows(segments[1][:, None, :, None], start, stop, size, band.width).mT)
    allowed = allowed.repeat(*[1] * (allowed.ndim - 2), q.shape[1] // kv_heads, 1)
    out, lse = softmax_of_scores(x @ y.mT + torch.where(allowed, 0.0, -torch.inf), u)
    heads, length = q.shape[1], rows.stop - rows.start
    return from_tiles(out, heads, length).to(q.dtype), from_tiles(lse, heads, length)


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
        size, length = block_size(q, band.width, least=band.size, multiple=band.size), q.shape[2]
        for first in range(0, length, size):
            rows = slice(first, min(first + size, length))
            start, stop = band.around(rows)
            here = slice(max(start, 0), min(stop, k.shape[2]))
            local = band._replace(ahead=band.ahead + rows.start - here.start), *_cut(rows, here, key_mask, segments)
            tensors = (x.detach().requires_grad_() for x in (q[:, :, rows], k[:, :, here], v[:, :, here]))
            block = slice(0, rows.stop - rows.start), *tensors, *local
            found: Any = gradients_of(_attend_block, block, [g[:, :, rows] for g in gradients])
            _, dq[:, :, rows], new_k, new_v, *_ = found
            dk[:, :, here] += new_k
            dv[:, :, here] += new_v
        nothing = [None] * (len(band) + 1), None if segments is None else (None, None)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), *tree_leaves(nothing)


def _cut(rows: slice, here: slice, key_mask: Tensor | None, segments: tuple[Tensor, Tensor] | None) -> tuple[Any, Any]:
    """The masks of some queries and keys."""
    key_mask = None if key_mask is None else key_mask[:, here]
    return key_mask, None if segments is None else (segments[0][:, rows], segments[1][:, here])


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
    B, _, L, _ = q.shape
    chosen = global_keys(L, count, key_mask, causal, segments, q.device).expand(B, L)
    index = positions_of(chosen, count if causal else 2 * count, segments)  # [B, L or 1, N]
    present = beyond_band(torch.arange(L, device=q.device), index, bandwidth, causal)
    return attend_to_chosen(q, k, v, index, present, scale)


def beyond_band(positions: Tensor, index: Tensor, bandwidth: int, causal: bool) -> Tensor:
    """Which of the keys at `index` `[B, L or 1, N]`, -1 for none, queries at `positions` `[L]` see outside the band."""
    distance = positions[None, :, None] - index
    present = (index >= 0) & (distance.abs() > bandwidth)
    return present & (distance >= 0) if causal else present


def attend_to_chosen(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, present: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the keys at `index`: `[B, 1, N]`, or `[B, L, N]` for each query its own; and its lse."""
    (B, H, L, D), K, dtype = q.shape, k.shape[1], compute_dtype(q)
    flat = index.clamp(min=0).flatten(1)[:, None, :, None]
    y, u = (z.gather(2, flat.expand(-1, K, -1, z.shape[-1])).to(dtype) for z in (k, v))  # [B, K, L · N or N, E]
    if index.shape[1] == 1:
        return attend(q.to(dtype), y, u, torch.where(present[:, None], 0.0, -torch.inf), scale)
    y, u = (z.view(B, K, 1, L, -1, z.shape[-1]) for z in (y, u))
    x = (q.to(dtype) * scale).reshape(B, K, H // K, L, 1, D)
    scores = (x * y).sum(-1).masked_fill(~present[:, None, None], -torch.inf)  # [B, K, G, L, N]
    out, lse = softmax_of_scores(scores.unsqueeze(-2), u)
    return tuple(z.reshape(B, H, L, -1) for z in (out, lse))  # type: ignore[return-value]


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
    bias = None if key_mask is None else torch.where(key_mask[:, None, None], 0.0, -torch.inf)
    at = index[:, None, :, None]
    x = q.gather(2, at.expand(-1, H, -1, q.shape[-1])).to(dtype)
    rows = attend(x, k.to(dtype), v.to(dtype), bias, scale)[0].to(out.dtype)
    rows = rows.masked_fill(~there[:, None, :, None], 0)
    return out.masked_fill(chosen[:, None, :, None], 0).scatter_add(2, at.expand(-1, H, -1, D), rows)


@dataclass
class Globals(State):
    """The global keys of each sequence, N slots that fill up with its first visible keys."""

    keys: Tensor  # [B, Hkv, N, D]
    values: Tensor
    positions: Tensor  # [B, N]
    count: Tensor  # [B, 1], visible keys so far
    seen: Tensor  # [B, 1], positions so far
    in_window: Tensor  # [B, W + 1], keys of the window that are global

    def with_new(self, k: Tensor, v: Tensor, visible: Tensor) -> "Globals":
        """After new tokens; their part of `in_window` behind the old one."""
        rank = self.count + visible.long().cumsum(1) - visible.long()  # [B, L]
        slots = self.keys.shape[2]
        chosen = visible & (rank < slots)
        place = chosen[:, None] & (rank[:, None] == torch.arange(slots, device=k.device)[:, None])  # [B, N, L]
        positions = self.seen + torch.arange(k.shape[2], device=k.device)  # [B, L]
        one = place[:, None].to(k.dtype)
        return Globals(
            self.keys + one @ k,
            self.values + one @ v,
            self.positions + (place.long() * positions[:, None]).sum(-1),
            self.count + visible.long().sum(1, keepdim=True),
            positions[:, -1:] + 1,
            torch.cat([self.in_window, chosen], dim=1),
        )


@dataclass
class Window(State):
    """The near field of generation: the last W + 1 keys and values, and the global ones."""

    keys: Tensor  # [B, Hkv, W + 1, D]
    values: Tensor  # [B, Hkv, W + 1, Dv]
    visible: Tensor  # [B, W + 1]
    globals: Globals | None

    @staticmethod
    def new(batch: int, heads: int, head_dim: int, value_dim: int, bandwidth: int, global_tokens: int, like: Tensor):
        """The empty window, `like` a tensor in dtype and device."""
        width, count = bandwidth + 1, global_tokens
        zeros, long = like.new_zeros, torch.long
        chosen = None
        if count:
            chosen = Globals(
                zeros(batch, heads, count, head_dim),
                zeros(batch, heads, count, value_dim),
                zeros(batch, count, dtype=long),
                zeros(batch, 1, dtype=long),
                zeros(batch, 1, dtype=long),
                zeros(batch, width, dtype=torch.bool),
            )
        return Window(
            zeros(batch, heads, width, head_dim),
            zeros(batch, heads, width, value_dim),
            zeros(batch, width, dtype=torch.bool),
            chosen,
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], "Window"]:
        """Attention of new tokens to the near field, with its lse; what leaves the window by then, keys, values and
        which of them a far field takes over; and the new window.

        New query i sees, through the far field, the first i + 1 of what leaves.
        """
        dtype, length, bandwidth = self.keys.dtype, k.shape[2], self.keys.shape[2] - 1
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        new = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        keys, values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        visible = torch.cat([self.visible, new], dim=1)
        if length == 1:  # all but the first are in its band
            bias = torch.where(visible[:, None, None, 1:], 0.0, -torch.inf)
            near = attend(q, keys[:, :, 1:], values[:, :, 1:], bias, scale)
        else:
            near = banded_attention(q, keys, values, bandwidth, scale=scale, key_mask=visible, causal=True)
        far, chosen = visible, None
        if self.globals is not None:
            chosen = self.globals.with_new(k, v, new)
            far = visible & ~chosen.in_window
            chosen.in_window = chosen.in_window[:, length:]
            filled = torch.arange(chosen.keys.shape[2], device=k.device) < chosen.count  # [B, N]
            positions = self.globals.seen + torch.arange(length, device=k.device)
            beyond = positions[:, :, None] - chosen.positions[:, None] > bandwidth  # [B, L, N]
            bias = torch.where((filled[:, None] & beyond)[:, None], 0.0, -torch.inf)
            near = merge(near, attend(q, chosen.keys, chosen.values, bias, scale))
        gone, kept = slice(0, length), slice(length, None)
        window = Window(keys[:, :, kept], values[:, :, kept], visible[:, kept], chosen)
        return near, (keys[:, :, gone], values[:, :, gone], far[:, gone]), window
