"""Exact softmax attention within a band around the diagonal, and to and from a few global tokens.

Both are linear in L. A band is not computed as a dense masked matrix: queries are split into tiles, and each tile
attends to its own keys and to those of the neighbouring tiles within the band.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from . import backend, fused
from .autograd import differentiate, gradients_of, keep, kept
from .linear import State, compute_dtype
from .masks import global_keys, positions_of
from .softmax import attend, merge, softmax_of_scores
from .tiles import block_size, from_tiles, into_tiles, traced, traced_filling, windows

TILES = (32, 64, 128)  # tile sizes; small tiles waste less work for a narrow band


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

    There may be more keys `[B, Hkv, Lk, D]` and values `[B, Hkv, Lk, Dv]` than queries `[B, H, Lq, D]`; the last query
    is aligned with the last key. `key_mask` `[B, Lk]`: True for keys that are not padding. `segments` `[B, L]`: index
    of the packed sequence of each token. A query that sees no key has out = 0 and lse = -inf. O(Lq · bandwidth · D)
    time, O(L · D) memory.
    """
    this = partial(banded_attention, bandwidth=bandwidth, scale=scale, causal=causal)
    if q.device.type in backend.DEVICES and backend.fused("band", this, (q, k, v)):
        return fused.banded_attention(q, k, v, bandwidth, scale, key_mask, causal, segments)
    for size in TILES:
        if bandwidth <= size:
            break
    if not traced():  # in compiled code, sizes that depend on the length would cause recompilation
        size, bandwidth = min(size, q.shape[2]), min(bandwidth, k.shape[2])
    left = -(-bandwidth // size) * size
    band = _Band(bandwidth, scale, causal, size, left, 0 if causal else left, k.shape[2] - q.shape[2])
    arguments = q, k, v, band, key_mask, None if segments is None else (segments, segments)
    found = differentiate(_BandedAttention, *arguments) if torch.is_grad_enabled() else None
    return _attention(*arguments) if found is None else found


class _Band(NamedTuple):
    """A band in tiles of `size` positions, with the keys on both sides of a tile that the band covers."""

    bandwidth: int
    scale: float
    causal: bool
    size: int
    left: int  # keys before a tile
    right: int  # keys after a tile
    ahead: int  # position of the first query among the keys


def _attention(q, k, v, band, key_mask, segments) -> tuple[Tensor, Tensor]:
    blocks = _blocks(q, k, v, band, key_mask, segments)
    if len(blocks) == 1:
        return _attend_block(*blocks[0][2])
    outs, logs = zip(*(_attend_block(*block) for _, _, block in blocks), strict=True)
    return torch.cat(outs, 2), torch.cat(logs, 2)


def _blocks(q, k, v, band: _Band, key_mask, segments) -> list[tuple[slice, slice, tuple[Any, ...]]]:
    """Split queries into blocks of whole tiles: their positions, those of their keys, and `_attend_block` arguments.

    Traced code uses one block.
    """
    length, k_length = q.shape[2], k.shape[2]
    step = block_size(q, band.left + band.size + band.right, least=band.size, multiple=band.size)
    if step >= length:
        return [(slice(0, length), slice(0, k_length), (q, k, v, band, key_mask, segments))]
    found = []
    for start in range(0, length, step):
        rows, first = slice(start, min(start + step, length)), start + band.ahead - band.left
        here = slice(max(first, 0), min(first + band.left + step + band.right, k_length))
        tensors = q[:, :, rows], k[:, :, here], v[:, :, here]
        visible = None if key_mask is None else key_mask[:, here]
        numbers = None if segments is None else (segments[0][:, rows], segments[1][:, here])
        local = band._replace(ahead=band.left + first - here.start)
        found.append((rows, here, (*tensors, local, visible, numbers)))
    return found


def _attend_block(q, k, v, band: _Band, key_mask, segments) -> tuple[Tensor, Tensor]:
    """Attention of all tiles at once, and its log-sum-exp."""
    (heads, length), (kv_heads, k_length), size = q.shape[1:3], k.shape[1:3], band.size
    width, start = band.left + size + band.right, band.ahead - band.left
    count = length + traced_filling(size) if traced() else -(-length // size) * size
    cut = start, start + count + width - size, size, width  # how keys become windows around tiles
    dtype = torch.promote_types(q.dtype, torch.float32)
    x = into_tiles(q.to(dtype) * band.scale, size, kv_heads)  # [B, Hkv, T, G · C, D]
    y, u = windows(k, *cut).to(dtype), windows(v, *cut).to(dtype)  # [B, Hkv, T, W, E]
    distance = torch.arange(band.left, band.left + size, device=q.device)[:, None]
    distance = distance - torch.arange(width, device=q.device)
    allowed = (distance.abs() <= band.bandwidth) & (distance >= 0 if band.causal else True)
    if key_mask is None and (traced() or start < 0 or cut[1] > k_length):
        key_mask = torch.ones(1, k_length, dtype=torch.bool, device=k.device)
    if key_mask is not None:
        allowed = allowed & windows(key_mask[:, None, :, None], *cut).mT
    if segments is not None:
        own = into_tiles(segments[0][:, None, :, None], size, 1)
        allowed = allowed & (own == windows(segments[1][:, None, :, None], *cut).mT)
    allowed = allowed.repeat(*[1] * (allowed.ndim - 2), heads // kv_heads, 1)
    out, lse = softmax_of_scores(x @ y.mT + torch.where(allowed, 0.0, -torch.inf), u)
    return from_tiles(out, heads, length).to(q.dtype), from_tiles(lse, heads, length)


class _BandedAttention(torch.autograd.Function):
    """Recomputes the scores of each block in backward."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Any:
        keep(ctx, spec, leaves)
        return _attention(*tree_unflatten(leaves, spec))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        arguments, _ = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, gradients)
        q, k, v, band, _, segments = arguments
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=compute_dtype(x)) for x in (k, v))
        for rows, here, block in _blocks(*arguments):
            tensors = (x.detach().requires_grad_() for x in block[:3])
            found: Any = gradients_of(_attend_block, (*tensors, *block[3:]), [g[:, :, rows] for g in gradients])
            dq[:, :, rows] = found[0]
            dk[:, :, here] += found[1]
            dv[:, :, here] += found[2]
        nothing = [None] * (len(band) + 1), None if segments is None else (None, None)
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), *tree_leaves(nothing)


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
    """Attention of every query over the global keys of its sequence outside the band, and its log-sum-exp.

    There are at most `count` global keys at each end of a sequence (`masks.global_keys`). O(L · count · D).
    """
    B, _, L, _ = q.shape
    chosen = global_keys(L, count, key_mask, causal, segments, q.device).expand(B, L)
    index = positions_of(chosen, count if causal else 2 * count, segments)  # [B, L or 1, N]
    present = beyond_band(torch.arange(L, device=q.device), index, bandwidth, causal)
    return attend_to_chosen(q, k, v, index, present, scale)


def beyond_band(positions: Tensor, index: Tensor, bandwidth: int, causal: bool) -> Tensor:
    """True where queries at `positions` `[L]` see the keys at `index` `[B, L or 1, N]` (-1: none) beyond the band."""
    distance = positions[None, :, None] - index
    present = (index >= 0) & (distance.abs() > bandwidth)
    return present & (distance >= 0) if causal else present


def attend_to_chosen(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, present: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the keys at `index`, `[B, 1, N]` or, per query, `[B, L, N]`; and its log-sum-exp."""
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
    """Replace the rows of global tokens in `out` `[B, H, L, D]` with softmax over all keys: the first `count` tokens
    and, unless `last` is False, the last `count`. O(count · L · D).

    For bidirectional attention only: if causal, tokens at the start of a sequence see hardly any others.
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
class Window(State):
    """Generation state of a near field: the last W + 1 keys and values, and N slots for the first visible ones, which
    are global.
    """

    keys: Tensor  # [B, Hkv, W + 1, D]
    values: Tensor  # [B, Hkv, W + 1, Dv]
    visible: Tensor  # [B, W + 1]
    global_keys: Tensor  # [B, Hkv, N, D]
    global_values: Tensor  # [B, Hkv, N, Dv]
    global_at: Tensor  # [B, N], positions of the global keys, -1 for an empty slot
    seen: Tensor  # [B, 1], number of positions so far
    empty: ClassVar[dict[str, float]] = {"global_at": -1}

    @staticmethod
    def new(batch, heads, value_dim, head_dim, bandwidth, global_tokens, dtype, device) -> "Window":
        """Create an empty window."""
        keys = torch.zeros(batch, heads, bandwidth + 1, head_dim, dtype=dtype, device=device)
        values = keys.new_zeros(batch, heads, bandwidth + 1, value_dim)
        visible = keys.new_zeros(batch, bandwidth + 1, dtype=torch.bool)
        first_keys = keys.new_zeros(batch, heads, global_tokens, head_dim)
        first_values = keys.new_zeros(batch, heads, global_tokens, value_dim)
        at = keys.new_full((batch, global_tokens), -1, dtype=torch.long)
        return Window(keys, values, visible, first_keys, first_values, at, at.new_zeros(batch, 1))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], "Window"]:
        """Attention of new tokens to the near field. Returns (output, log-sum-exp), (keys, values, mask) of the tokens
        that leave the window, where the mask is True for those that a far field must take over, and the new window.

        Through the far field, new query i sees the first i + 1 tokens that leave.
        """
        dtype, length, bandwidth = self.keys.dtype, k.shape[2], self.keys.shape[2] - 1
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        new = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        keys, values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        visible = torch.cat([self.visible, new], dim=1)
        if length == 1:  # all keys but the first are in the band
            bias = torch.where(visible[:, None, None, 1:], 0.0, -torch.inf)
            near = attend(q, keys[:, :, 1:], values[:, :, 1:], bias, scale)
        else:
            near = banded_attention(q, keys, values, bandwidth, scale=scale, key_mask=visible, causal=True)
        far, first_keys, first_values, first_at = visible, self.global_keys, self.global_values, self.global_at
        if first_at.shape[1]:
            at = self.seen - bandwidth - 1 + torch.arange(visible.shape[1], device=k.device)  # positions [B, W + 1 + L]
            slot = (first_at >= 0).sum(1, keepdim=True) + new.long().cumsum(1) - 1  # [B, L], if one is free
            takes = new[:, None] & (slot[:, None] == torch.arange(first_at.shape[1], device=k.device)[:, None])
            one = takes[:, None].to(dtype)  # [B, 1, N, L]
            first_keys, first_values = first_keys + one @ k, first_values + one @ v
            first_at = first_at + (takes.long() * (1 + at[:, None, -length:])).sum(-1)
            far = visible & ~(at[:, :, None] == first_at[:, None]).any(-1)
            beyond = (first_at >= 0)[:, None] & (at[:, -length:, None] - first_at[:, None] > bandwidth)  # [B, L, N]
            bias = torch.where(beyond[:, None], 0.0, -torch.inf)
            near = merge(near, attend(q, first_keys, first_values, bias, scale))
        gone, kept = slice(0, length), slice(length, None)
        window = keys[:, :, kept], values[:, :, kept], visible[:, kept], first_keys, first_values, first_at
        return near, (keys[:, :, gone], values[:, :, gone], far[:, gone]), Window(*window, self.seen + length)
