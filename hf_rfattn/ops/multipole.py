"""Multipole attention: exact for the keys that matter, block means for the rest; close to softmax without training.

Keys and values are grouped in blocks of c, queries in tiles of C. Each tile chooses some blocks (`multipole_choice`),
whose keys are exact. Every other block b is approximated by n_b copies of its mean key and mean value:

    out_i = (Σ_{j chosen} exp(x_i·y_j) v_j + Σ_{b not chosen} n_b exp(x_i·ȳ_b) v̄_b) / (the same sums without values).

If all blocks are chosen, this is softmax.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backend, fused
from .autograd import gradients_of
from .linear import compute_dtype
from .multipole_choice import SUBTILES, Order, Sizes, choose_blocks, inverse, orders, radius_of, take
from .softmax import LOG2_E, SOME, exp2_of_difference_, merge
from .tiles import BLOCK, OTHER_BLOCK, from_tiles, into_tiles, traced

LARGEST_BATCH = 65535  # of a CUDA kernel


def multipole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    *,
    order: Order = "auto",
    scale: float = 1.0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Bidirectional multipole attention `[B, H, Lq, Dv]`.

    Queries `[B, H, Lq, D]`, keys `[B, Hkv, Lk, D]`, values `[B, Hkv, Lk, Dv]`; `key_mask` `[B, Lk]`: True for keys that
    are not padding (and, if Lq = Lk, for queries). Blocks and tiles consist of tokens that are not padding, ordered by
    position or by content (`content_code`); "auto" chooses for each head (`prefers_content`). Time O(L · (exact keys +
    L / block) · D), memory O(L · D) plus O(tile · L / block) for some tiles at a time, in backward too.
    """
    dtype, heads = compute_dtype(q), k.shape[1]
    x, y, u = (z.to(dtype) for z in (q, k, v))
    y_seen = None if key_mask is None else key_mask[:, None]  # [B, 1, Lk]
    x_seen = y_seen if q.shape[2] == k.shape[2] else None
    y_order, x_order = orders(x, y, x_seen, y_seen, sizes, order, scale)
    x, y, u = take(x, x_order), take(y, y_order), take(u, y_order)
    x_seen, y_seen = _seen(x, x_seen, x_order, sizes.tile), _seen(y, y_seen, y_order, sizes.block)
    tiles = into_query_tiles(x, sizes.tile, heads)
    counted = None if x_seen is None else into_query_tiles(x_seen.expand(*x.shape[:3], 1), sizes.tile, heads)
    blocks, values = (into_blocks(z, sizes.block) for z in (y, u))  # [N, B, c, D]
    if y_seen is not None:
        y_seen = into_blocks(y_seen.expand(*y.shape[:3], 1), sizes.block)[..., 0]  # [N, B, c]
    this = partial(multipole_attention, sizes=sizes, order=order, scale=scale)
    if q.device.type in backend.DEVICES and backend.fused("multipole", this, (q, k, v)):
        chosen = _choose(tiles, counted, blocks, y_seen, sizes, scale)
        out = _by_fused_kernels(tiles, Blocks.of(blocks, values, y_seen), chosen, scale, q.dtype)
    else:
        out = _attention(tiles, counted, blocks, values, y_seen, sizes, scale)
    out = out_of_query_tiles(out, q.shape[1], heads, q.shape[2])
    return take(out, None if x_order is None else inverse(x_order)).to(q.dtype)


def _seen(x: Tensor, seen: Tensor | None, order: Tensor | None, size: int) -> Tensor | None:
    """`[B, H or 1, L, 1]`, False for padding, in the new order of tokens; None if there is none and tiles are full."""
    if seen is None:
        if not traced() and x.shape[2] % size == 0:
            return None
        return torch.ones_like(x[:1, :1, :, :1], dtype=torch.bool)
    seen = seen.expand(*x.shape[:3])
    return (seen if order is None else seen.gather(2, order)).unsqueeze(-1)


def into_query_tiles(x: Tensor, size: int, heads: int) -> Tensor:
    """`[B, H, L, E]` → `[N = B · Hkv, T, C, E]`: query heads that share keys become further tiles over these keys."""
    return into_tiles(x, size, x.shape[1]).unflatten(1, (heads, -1)).flatten(2, 3).flatten(0, 1)


def out_of_query_tiles(x: Tensor, heads: int, kv_heads: int, length: int) -> Tensor:
    """The reverse of `into_query_tiles`."""
    x = x.unflatten(0, (-1, kv_heads)).unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)
    return from_tiles(x, heads, length)


def into_blocks(x: Tensor, size: int) -> Tensor:
    """`[B, Hkv, L, E]` → `[N = B · Hkv, blocks, c, E]`."""
    return into_tiles(x, size, x.shape[1]).flatten(0, 1)


class Blocks(NamedTuple):
    """Keys and values in blocks, with a summary of each block.

    A process that holds a part of a sharded sequence has the keys and values of some blocks only; see `slot`.
    """

    y: Tensor  # [N, B, c, D], 0 for padding
    u: Tensor  # [N, B, c, Dv]
    seen: Tensor | None  # [N, B, c], False for padding
    keys: Tensor  # [N, B], number of keys that are not padding
    mean_y: Tensor  # [N, B, D]
    mean_u: Tensor  # [N, B, Dv]
    slot: Tensor | None = None  # [N, B], index of each block in y and u; None if y and u have all blocks in order

    @staticmethod
    def of(y: Tensor, u: Tensor, seen: Tensor | None) -> "Blocks":
        if seen is None:
            return Blocks(y, u, None, y.new_full(y.shape[:2], y.shape[2]), y.mean(2), u.mean(2))
        y, u = (z.masked_fill(~seen.unsqueeze(-1), 0) for z in (y, u))
        count = seen.sum(2).to(y.dtype)
        least = count.clamp(min=1).unsqueeze(-1)
        return Blocks(y, u, seen, count, y.sum(2) / least, u.sum(2) / least)

    def split(self, rows: int) -> "list[Blocks]":
        """Split into groups of `rows` sequences."""
        fields = [[None] * -(-len(self.y) // rows) if z is None else z.split(rows) for z in self]
        return [Blocks(*part) for part in zip(*fields, strict=True)]

    def near(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values `[N, T, t · c, D]` of the chosen blocks, and a bias `[N, T, 1, t · c]` that hides padding."""
        rows = self.rows(chosen)

        def take(x: Tensor) -> Tensor:
            return x.flatten(0, 1).flatten(1).index_select(0, rows).view(*chosen.shape[:2], -1, x.shape[-1])

        if self.seen is None:
            return take(self.y), take(self.u), None
        hidden = torch.zeros_like(self.y[..., :1]).masked_fill(~self.seen.unsqueeze(-1), -torch.inf)
        return take(self.y), take(self.u), take(hidden).mT

    def rows(self, chosen: Tensor) -> Tensor:
        """Indices of the chosen blocks in y and u, flattened over all sequences: `[N · T · t]`."""
        if self.slot is not None:
            chosen = self.slot.gather(1, chosen.flatten(1)).view_as(chosen)
        start = torch.arange(chosen.shape[0], device=chosen.device) * self.y.shape[1]
        return (chosen + start[:, None, None]).flatten()

    def far_bias(self, chosen: Tensor) -> Tensor:
        """`[N, T, 1, B]`: log₂ n_b, -inf for chosen blocks."""
        bias = self.keys.log2().unsqueeze(1).expand(-1, chosen.shape[1], -1)
        return bias.scatter(2, chosen, -torch.inf).unsqueeze(2)


def _attention(tiles, counted, y, u, seen, sizes: Sizes, scale: float) -> Tensor:
    if traced():
        return _at_once(tiles, counted, y, u, seen, sizes, scale)
    if torch.is_grad_enabled() and any(z.requires_grad for z in (tiles, y, u)):
        return _MultipoleAttention.apply(tiles, counted, y, u, seen, sizes, scale)
    return _forward(tiles, counted, y, u, seen, sizes, scale)[0]


def _at_once(tiles, counted, y, u, seen, sizes: Sizes, scale: float) -> Tensor:
    """All tiles in plain operations, for traced code and second derivatives."""
    chosen = _choose(tiles, counted, y, seen, sizes, scale)
    return attend_to_blocks(tiles, Blocks.of(y, u, seen), chosen, scale)[0]


def _choose(tiles, counted, y, seen, sizes: Sizes, scale: float) -> Tensor:
    """The blocks `[N, T, t]` chosen by all tiles, from the keys of all blocks."""
    blocks = Blocks.of(y.detach(), y.detach()[..., :0], seen)
    radius = radius_of(blocks.y.square().sum((2, 3)) / blocks.keys.clamp(min=1), blocks.mean_y)
    radius = radius.masked_fill_(blocks.keys == 0, -torch.inf)
    return choose(tiles.detach(), counted, blocks.mean_y, radius, sizes, scale)


def choose(tiles: Tensor, counted: Tensor | None, mean_y: Tensor, radius: Tensor, sizes: Sizes, scale: float) -> Tensor:
    """The blocks `[N, T, t]` chosen by all tiles; see `choose_blocks`."""
    count = min(sizes.chosen, mean_y.shape[1])
    if traced():
        return choose_blocks(tiles, counted, mean_y, radius, count, sizes.first, scale)
    chosen = torch.empty(*tiles.shape[:2], count, dtype=torch.long, device=mean_y.device)
    for n, columns in _chunks(tiles, max(SUBTILES * mean_y.shape[1], tiles[0, 0].numel())):
        for t in columns:
            votes = None if counted is None else counted[n, t]
            chosen[n, t] = choose_blocks(tiles[n, t], votes, mean_y[n], radius[n], count, sizes.first, scale)
    return chosen


def attend_to_blocks(tiles: Tensor, blocks: Blocks, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (base 2) `[N, T, C, 1]` of some tiles over the keys of the chosen blocks and the means of
    the others.
    """
    x = tiles * (scale * LOG2_E)
    near_y, near_u, bias = blocks.near(chosen)
    near, far = x @ near_y.mT, (x.flatten(1, 2) @ blocks.mean_y.mT).view(*x.shape[:3], -1)
    far.add_(blocks.far_bias(chosen))
    if bias is not None:
        near.add_(bias)
    largest = torch.maximum(*(z.detach().amax(-1, keepdim=True) for z in (near, far)))
    near, far = exp2_of_difference_(near, largest), exp2_of_difference_(far, largest)
    total = (near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True)).clamp(min=SOME)
    out = (far.flatten(1, 2) @ blocks.mean_u).view(*x.shape[:3], -1)
    return (out + near @ near_u) / total, largest + total.log2()


def _by_fused_kernels(tiles: Tensor, blocks: Blocks, chosen: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`attend_to_blocks` by FlexAttention: tiles as a batch over their exact keys, and all queries over block means."""
    rows = max(LARGEST_BATCH // tiles.shape[1], 1)
    if len(tiles) > rows and not traced():
        some = zip(tiles.split(rows), blocks.split(rows), chosen.split(rows), strict=True)
        return torch.cat([_by_fused_kernels(*arguments, scale, dtype) for arguments in some])

    def batch(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(1).to(dtype)  # [N · T, 1, …]

    near_y, near_u, bias = blocks._replace(y=blocks.y.to(dtype), u=blocks.u.to(dtype)).near(chosen)
    key_bias = None if bias is None else bias.flatten(0, 1)
    near = fused.attend(batch(tiles), batch(near_y), batch(near_u), scale=scale, key_bias=key_bias)
    x, mean_y, mean_u = (z.unsqueeze(1).to(dtype) for z in (tiles.flatten(1, 2), blocks.mean_y, blocks.mean_u))
    far_bias = blocks.far_bias(chosen).transpose(1, 2) / LOG2_E
    far = fused.attend(x, mean_y, mean_u, scale=scale, tile_bias=far_bias)
    parts = [[z.view(*tiles.shape[:3], -1).to(tiles.dtype) for z in part] for part in (near, far)]
    return merge((parts[0][0], parts[0][1]), (parts[1][0], parts[1][1]))[0]


def _chunks(tiles: Tensor, numbers: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield groups of sequences and of their tiles whose intermediate results, `numbers` per tile, fit into the CPU's
    caches.
    """
    N, T = tiles.shape[:2]
    at_once = max(BLOCK.get(tiles.device.type, OTHER_BLOCK) // numbers, 1)
    rows, columns = max(at_once // T, 1), min(at_once, T)
    for n in range(0, N, rows):
        yield slice(n, n + rows), [slice(t, t + columns) for t in range(0, T, columns)]


def slabs(tiles: Tensor, blocks: int, sizes: Sizes) -> Iterator[tuple[slice, list[slice]]]:
    C, D = tiles.shape[2:]
    return _chunks(tiles, max(sizes.chosen * sizes.block * D, C * blocks))


def _forward(tiles, counted, y, u, seen, sizes: Sizes, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and chosen blocks of all tiles."""
    out, lse = (tiles.new_empty(*tiles.shape[:3], size) for size in (u.shape[3], 1))
    chosen = _choose(tiles, counted, y, seen, sizes, scale)
    for n, columns in slabs(tiles, y.shape[1], sizes):
        blocks = Blocks.of(y[n], u[n], None if seen is None else seen[n])
        for t in columns:
            out[n, t], lse[n, t] = attend_to_blocks(tiles[n, t], blocks, chosen[n, t], scale)
    return out, lse, chosen


class _MultipoleAttention(torch.autograd.Function):
    """Saves the chosen blocks and recomputes the scores in backward."""

    @staticmethod
    def forward(ctx: Any, tiles, counted, y, u, seen, sizes: Sizes, scale: float) -> Tensor:
        out, lse, chosen = _forward(tiles, counted, y, u, seen, sizes, scale)
        ctx.sizes, ctx.scale = sizes, scale
        ctx.save_for_backward(tiles, counted, y, u, seen, out, lse, chosen)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tiles, counted, y, u, seen, out, lse, chosen = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            arguments = (tiles, counted, y, u, seen, ctx.sizes, ctx.scale)
            return *gradients_of(_at_once, arguments, [grad])[:5], None, None
        d_tiles, d_y, d_u = torch.empty_like(tiles), torch.zeros_like(y), torch.zeros_like(u)
        for n, columns in slabs(tiles, y.shape[1], ctx.sizes):
            blocks = Blocks.of(y[n], u[n], None if seen is None else seen[n])
            far = torch.zeros_like(blocks.mean_y), torch.zeros_like(blocks.mean_u)
            for t in columns:
                x, g, offset = tiles[n, t] * (ctx.scale * LOG2_E), grad[n, t], lse[n, t]
                delta = (g * out[n, t]).sum(-1, keepdim=True)
                near_y, near_u, bias = blocks.near(chosen[n, t])
                dx, *near = _gradients(x, near_y, near_u, bias, offset, delta, g)
                rows = blocks.rows(chosen[n, t])
                for total, part in zip((d_y[n], d_u[n]), near, strict=True):
                    total.view(-1, total.shape[2] * total.shape[3]).index_add_(0, rows, part.view(len(rows), -1))
                flat = [z.flatten(1, 2) for z in (x, offset, delta, g)]
                dx_far, *parts = _gradients(
                    flat[0], blocks.mean_y, blocks.mean_u, blocks.far_bias(chosen[n, t]), *flat[1:]
                )
                d_tiles[n, t] = dx.add_(dx_far.view_as(dx)).mul_(ctx.scale)
                for total, part in zip(far, parts, strict=True):
                    total += part
            count = blocks.keys.clamp(min=1).unsqueeze(-1)
            for total, part in zip((d_y[n], d_u[n]), far, strict=True):
                total += (part / count).unsqueeze(2)
            d_y[n] /= LOG2_E  # x includes this factor
        if seen is not None:
            d_y, d_u = (z.masked_fill_(~seen.unsqueeze(-1), 0) for z in (d_y, d_u))
        return d_tiles, None, d_y, d_u, None, None, None


def _gradients(x, y, u, bias, lse, delta, grad) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries `[..., Q, D]`, keys and values `[..., n, D]` for one part of attention; `lse` is the
    log-sum-exp over all parts, `delta` is grad · out.
    """
    scores = x @ y.mT
    if bias is not None:
        scores.view(*bias.shape[:2], -1, bias.shape[3]).add_(bias)
    weights = exp2_of_difference_(scores, lse)
    d_scores = (grad @ u.mT).sub_(delta).mul_(weights)
    return d_scores @ y, d_scores.mT @ x, weights.mT @ grad
