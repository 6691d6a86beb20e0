"""Causal linear attention in tiles of positions.

Scores within a tile are computed for each pair of tokens; everything before the tile is read from the running sums S
and z. Three offsets keep all numbers near one. The sums are scaled, *per feature*, by the largest log-feature seen so
far, so the feature that matters most to a query does not underflow. Inside a tile, each key is scaled by its largest
log-feature c_j. Each query is scaled by the largest scale among the sums and keys it sees. Padding and future tokens do
not affect the offsets, and no epsilon is added. Offsets cancel, so autograd treats them as constants. If the products
of a query with all keys of its tile still underflow, the block is recomputed in small tiles with one offset per pair.

Backward by hand: with d_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j), weights P_ij = φ(x_i)ᵀφ(y_j) / d_i and g the gradient of out,

    ∂φ(x_i) = Σ_{j≤i} φ(y_j) e_ij / d_i,  ∂φ(y_j) = Σ_{i≥j} φ(x_i) e_ij / d_i,  e_ij = g_iᵀ(v_j - out_i) + ∂log d_i,

and ∂v_j = Σ_{i≥j} P_ij g_i. Outside of a tile, ∂φ(x) reads the running sums of forward, while ∂φ(y) and ∂v read the
gradient of those sums, which accumulates from the last tile to the first on the same scales.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from . import backend, fused
from .autograd import differentiate, gradients_of, keep, kept, recompute
from .linear import FeatureFunction, FeatureGradients, Features, Sums, filled, floored
from .softmax import exp_of_difference
from .tiles import block_size, from_tiles, into_tiles, traced

TILE = 64  # positions per tile
TRACED_TILE = 128  # in traced code, which combines the sums of tiles in pairs instead of a loop
EXACT_TILE = 8  # with one offset per pair, which needs the features of all pairs in memory


def causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: FeatureFunction,
    phi_k: FeatureFunction,
    key_mask: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    sums: Sums | None = None,
) -> tuple[Tensor, Tensor, Sums]:
    """out_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j) v_j / d_i, `[B, H, L, Dv]`; lse_i = log d_i, `[B, H, L, 1]`, with d_i = Σ_{j≤i}
    φ(x_i)ᵀφ(y_j), -inf where d_i is not positive; and the sums after the last key.

    Query i of q `[B, H, L, D]` sees the keys j ≤ i of k `[B, Hkv, L, D]` and v `[B, Hkv, L, Dv]` and those in `sums`.
    `key_mask` `[B, L]`: True for keys that are not padding. `segments`: indices of packed sequences, `[B, L]` for
    queries and for keys, each contiguous; a query only sees keys with its own index, and `sums` belong to the first
    sequence. O(L · (TILE · (M + D) + M · D)) time, O(L · D) memory.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    if sums is None:
        sums = Sums.of_none(phi_k, (v.shape[0], v.shape[1], v.shape[3]), dtype, v.device)
    arguments = q, k, v, phi_q, phi_k, key_mask, segments, (sums.log_scale, sums.outer, sums.total)
    found: Any = None
    if q.shape[2] == 1 and segments is None:  # a step of generation
        visible = None if key_mask is None else key_mask[:, None, :, None]
        sums = sums.plus(Sums.of(phi_k(k.to(dtype)), v.to(dtype), visible))
        found = *sums.read(phi_q(q.to(dtype)), phi_q.floor), *sums.tensors()
    elif q.device.type in backend.DEVICES and _fused(arguments[:5]):
        found = fused.causal_linear_attention(*arguments)
    elif phi_q.positive and torch.is_grad_enabled():
        found = differentiate(_CausalAttention, *arguments)
    if found is None:
        found, _ = _by_blocks(*arguments)
    out, log_d, *after = found
    lse = log_d + phi_q.map.query_offset(q.to(dtype), phi_q.scale, *phi_q.tensors)
    return out.to(q.dtype), lse, Sums(*after)


def _fused(arguments: tuple[Any, ...]) -> bool:
    problem = None if arguments[3].positive else "features are signed"
    if traced():
        problem = "kernels of flash-linear-attention cannot be part of a compiled graph"
    return backend.fused("causal", causal_linear_attention, arguments, problem)


def linear_multiply_adds(length: int, features: int, value_dim: int, causal: bool) -> int:
    """Multiply-adds of linear attention for one head, without those of the features."""
    sums = 2 * length * features * (value_dim + 1)
    return sums + length * min(length, TILE) * (features + value_dim) if causal else sums


class _Block(NamedTuple):
    """Rows that are computed at once."""

    rows: slice
    exact: bool  # with one offset per pair
    sums: tuple[Tensor, ...]  # before these rows


def _by_blocks(q, k, v, phi_q, phi_k, key_mask, segments, sums) -> tuple[tuple[Tensor, ...], list[_Block]]:
    """Output, log d and the sums after the last key; and the list of blocks. Traced code uses one block.

    Blocks are half as long as elsewhere, since more tensors are in use at once.
    """
    size = block_size(q, 2 * max(q.shape[3], phi_k.size), phi_k.size, TILE)
    parts = [(q, k, v)] if size >= q.shape[2] else zip(*(z.split(size, dim=2) for z in (q, k, v)), strict=True)
    attend = partial(recompute, _attend) if torch.is_grad_enabled() else _attend
    outs, logs, blocks, stop = [], [], [], 0
    for tokens in parts:
        rows = slice(stop, stop + tokens[0].shape[2])
        arguments = *tokens, phi_q, phi_k, phi_q.floor, key_mask, segments
        lost, *found = attend(rows, False, *arguments, *sums)
        exact = phi_q.positive and not traced() and bool(lost.any())
        if exact:
            _, *found = attend(rows, True, *arguments, *sums)
        if not traced():  # a list of rows would specialise a compiled graph to their number
            blocks.append(_Block(rows, exact, sums))
        out, log_d, *sums = found
        outs.append(out)
        logs.append(log_d)
        stop = rows.stop
    if len(outs) > 1:
        out, log_d = torch.cat(outs, dim=2), torch.cat(logs, dim=2)
    return (out, log_d, *sums), blocks


class _Tiles(NamedTuple):
    """Rows in T tiles of C positions. The G query heads that share a key head are in the same tile."""

    q: Features  # [B, Hkv, T, G·C, M]
    k: Features  # [B, Hkv, T, C, M], zero for padding
    v: Tensor  # [B, Hkv, T, C, Dv]
    pairs: Tensor  # [B or 1, 1, T or 1, G·C, C], 0 for visible pairs, -inf for others
    entering: Features  # k, without keys that later tiles do not see
    ended: Tensor | None = None  # [B, 1, T, 1, 1], True where no earlier key is visible after this tile
    mine: Tensor | None = None  # [B, 1, T, G·C, 1], True for queries that read the sums before their tile

    @staticmethod
    def of(rows: slice, exact: bool, q: Features, k: Features, v: Tensor, key_mask, segments) -> "_Tiles":
        """Build tiles from features and values of the rows, and masks of the whole sequence."""
        (heads, length), kv_heads = q.log.shape[1:3], v.shape[1]
        size = TRACED_TILE if traced() else min(EXACT_TILE if exact else TILE, length)
        log = k.log if key_mask is None else k.log.masked_fill(~key_mask[:, None, rows, None], -torch.inf)
        k = Features(into_tiles(log, size, kv_heads, -torch.inf), k.factor)
        q, v = Features(into_tiles(q.log, size, kv_heads), q.factor), into_tiles(v, size, kv_heads)
        if q.factor is not None and k.factor is not None:
            q = q._replace(factor=into_tiles(q.factor, size, kv_heads))
            k = k._replace(factor=into_tiles(k.factor, size, kv_heads))
        pair = torch.ones(size, size, dtype=torch.bool, device=v.device).tril().repeat(heads // kv_heads, 1)
        if segments is None:
            return _Tiles(q, k, v, torch.where(pair, 0.0, -torch.inf)[None, None, None], k)
        # [B, T, C]; positions after the end are padding
        own, theirs = (into_tiles(s[:, None, rows, None], size, 1)[:, 0, ..., 0] for s in segments)
        before = segments[1][:, max(rows.start - 1, 0), None, None]
        last = torch.cat([before, theirs[:, :, -1:]], dim=1)  # of the keys before each tile
        enters = (theirs == last[:, 1:])[:, None, :, :, None]
        ended = (last[:, 1:] != last[:, :-1])[:, None, :, :, None]
        own = own.repeat(1, 1, heads // kv_heads)
        mine = (own == last[:, :-1])[:, None, :, :, None]
        pair = pair & (own.unsqueeze(-1) == theirs.unsqueeze(-2))[:, None]
        entering = k._replace(log=k.log.masked_fill(~enters, -torch.inf))
        return _Tiles(q, k, v, torch.where(pair, 0.0, -torch.inf), entering, ended, mine)

    def running_sums(self, sums: Sums) -> tuple[Sums, Sums, Tensor, Tensor]:
        """Return the sums before each tile, `[B, Hkv, T, …]`, and after the last; φ of keys on the scale of the sums
        after their tile; and the decay of the sums from before to after each tile, `[B, Hkv, T, M, 1]`.
        """
        new = self.entering.log.detach().amax(-2, keepdim=True)
        scales = [sums.log_scale.detach().unsqueeze(2)]
        if self.ended is None:
            scale = torch.cat([*scales, new], dim=2).cummax(2).values
        else:
            for t in range(new.shape[2]):
                past = scales[-1].masked_fill(self.ended[:, :, t : t + 1], -torch.inf)
                scales.append(torch.maximum(past, new[:, :, t : t + 1]))
            scale = torch.cat(scales, dim=2)
        before, after = scale[:, :, :-1], scale[:, :, 1:]
        decay = exp_of_difference(before, after).mT
        if self.ended is not None:
            decay = decay.masked_fill(self.ended, 0)
        phi = self.entering.divided(after)
        outers, outer = decayed_sums(phi.mT @ self.v, decay, sums.outer)
        totals, total = decayed_sums(phi.sum(-2).unsqueeze(-1), decay, sums.total)
        return Sums(before, outers, totals), Sums(after[:, :, -1].clone(), outer, total), phi, decay

    def running_sums_by_pairs(self, sums: Sums) -> tuple[Sums, Sums]:
        """Return the sums before each tile and after the last, without a loop: weighted sums over all earlier tiles."""
        own = Sums.of(self.entering, self.v)
        scale, outer, total = (
            torch.cat([a.unsqueeze(2), b], dim=2) for a, b in zip(sums.tensors(), own.tensors(), strict=True)
        )  # of the past, and of each tile
        steps = torch.arange(scale.shape[2], device=scale.device)
        seen = (steps <= steps[:, None])[None, None]  # [B, 1, T + 1, T + 1], in the sums after each of them
        if self.ended is not None:
            number = F.pad(self.ended.flatten(2).long().cumsum(2), (1, 0))  # [B, 1, T + 1]
            seen = seen & (number.unsqueeze(2) == number.unsqueeze(3))
        logs = scale.detach().transpose(2, 3).masked_fill(~seen.unsqueeze(-1), -torch.inf)  # [B, Hkv, T + 1, T + 1, M]
        largest = logs.amax(3, keepdim=True)
        weights = exp_of_difference(logs, largest).permute(0, 1, 4, 2, 3)  # [B, Hkv, M, T + 1, T + 1]
        weights = weights.expand(-1, -1, outer.shape[3], -1, -1)  # all features may share one scale
        outer, total = ((weights @ z.transpose(2, 3)).transpose(2, 3) for z in (outer, total))
        before = Sums(largest[:, :, :-1], outer[:, :, :-1], total[:, :, :-1])
        return before, Sums(largest[:, :, -1], outer[:, :, -1], total[:, :, -1])


def decayed_sums(terms: Tensor, decay: Tensor, start: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """s ← terms_t + decay_t · s along dimension 2. Returns the sum before each step and the final sum."""
    steps = range(terms.shape[2])
    if torch.is_grad_enabled():
        sums = [start]
        for t in steps:
            sums.append(torch.addcmul(terms[:, :, t], decay[:, :, t], sums[-1]))
        return torch.stack(sums[:-1], dim=2), sums[-1]
    before, now = torch.empty_like(terms), start
    for t in reversed(steps) if backward else steps:
        before[:, :, t] = now
        now = torch.addcmul(terms[:, :, t], decay[:, :, t], before[:, :, t])
    return before, now


def _attend(rows, exact, x, y, u, phi_q, phi_k, floor, key_mask, segments, *sums: Tensor) -> tuple[Tensor, ...]:
    """Return a mask of queries whose products with all visible keys have underflowed (never with `exact`), then output,
    log d and the sums after these rows.
    """
    (heads, length), dtype = x.shape[1:3], sums[1].dtype
    tiles = _Tiles.of(rows, exact, phi_q(x.to(dtype)), phi_k(y.to(dtype)), u.to(dtype), key_mask, segments)
    q, k = tiles.q, tiles.k
    before, after = (tiles.running_sums_by_pairs if traced() else tiles.running_sums)(Sums(*sums))[:2]
    q_scale: Tensor | float
    if exact:  # one offset per pair
        logs = q.log.unsqueeze(-2) + k.log.unsqueeze(-3)  # [B, Hkv, T, G·C, C, M]
        q_scale, pair_scale = 0.0, logs.detach().amax(-1)
        weights = exp_of_difference(logs, pair_scale.unsqueeze(-1)).sum(-1)
    else:
        q_scale, k_scale = q.log.detach().amax(-1, keepdim=True), k.log.detach().amax(-1, keepdim=True)
        weights, pair_scale = q.divided(q_scale) @ k.divided(k_scale).mT, k_scale.mT
    pair_scale = pair_scale + tiles.pairs
    read = q._replace(log=q.log + before.log_scale)
    if tiles.mine is not None:
        read = read._replace(log=read.log.masked_fill(~tiles.mine, -torch.inf))
    scale = torch.maximum(pair_scale.amax(-1, keepdim=True) + q_scale, read.log.detach().amax(-1, keepdim=True))

    weights = weights.mul_(exp_of_difference(pair_scale, scale - q_scale))
    phi = read.divided(scale)
    numerator = (weights @ tiles.v).add_(phi @ before.outer)
    d = weights.sum(-1, keepdim=True) + torch.linalg.vecdot(phi, before.total.mT).unsqueeze(-1)
    few = d < torch.finfo(d.dtype).tiny * 2**24  # has lost precision
    log_d = scale + d.masked_fill(few, 1.0).log().masked_fill(few, -torch.inf)
    least = None
    if floor is not None:
        weight = exp_of_difference(k.log.mT + tiles.pairs + q.log, scale).sum(-1, keepdim=True)
        weight = weight + exp_of_difference(read.log, scale) * before.total[..., -1:, :]
        least = floor.to(weight).unsqueeze(-1) * weight
    d = d.masked_fill(few, torch.inf) if q.factor is None else floored(d, least)
    out, log_d = from_tiles(numerator / d, heads, length), from_tiles(log_d, heads, length)
    return few & (scale > -torch.inf), out.to(x.dtype), log_d, after.log_scale, after.outer, after.total


class _CausalAttention(torch.autograd.Function):
    """Gradients of attention by hand, those of features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Any:
        found, blocks = _by_blocks(*tree_unflatten(leaves, spec))
        out, log_d, log_scale, *_ = found
        ctx.blocks = [(block.rows, block.exact) for block in blocks]
        keep(ctx, spec, leaves, out, log_d, *(z for block in blocks for z in block.sums))
        ctx.mark_non_differentiable(log_scale)
        return found

    @staticmethod
    def backward(ctx: Any, gradient, d_log_d, d_log_scale, d_outer, d_total) -> Any:
        arguments, (out, log_d, *states) = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, [gradient, d_log_d, d_log_scale, d_outer, d_total])
        q, k, v, phi_q, phi_k, key_mask, segments, _ = arguments
        queries, keys, dv = FeatureGradients(phi_q, q), FeatureGradients(phi_k, k), None
        log_d = log_d.masked_fill(log_d == -torch.inf, torch.inf)  # rows without any weight
        for number, (rows, exact) in reversed(list(enumerate(ctx.blocks))):
            g, u, o, log, d_log = (z[:, :, rows].to(log_d.dtype) for z in (gradient, v, out, log_d, d_log_d))
            lx, ly, state, masks = queries.logs(rows), keys.logs(rows), states[3 * number :][:3], (key_mask, segments)
            if exact:
                log_scale, outer, total = state
                inputs = [z.detach().requires_grad_() for z in (lx, ly, u, outer, total)]
                arguments = *inputs, rows, log_scale, *masks
                found: Any = gradients_of(_attend_to_logs, arguments, [g, d_log, d_outer, d_total])[:5]
                found = [torch.zeros_like(z) if d is None else d for z, d in zip(inputs, found, strict=True)]
            else:
                tiles = _Tiles.of(rows, False, Features(lx), Features(ly), u, *masks)
                shift = torch.linalg.vecdot(g, o).unsqueeze(-1) - d_log
                found = _backward(tiles, Sums(*state), g, shift, log, d_outer, d_total)
            d_lx, d_ly, du, d_outer, d_total = found
            dv = filled(dv, rows, du, v)
            queries.pull(d_lx)
            keys.pull(d_ly)
        d_masks = None, None if segments is None else (None, None)
        found = queries.d_tokens, keys.d_tokens, dv, queries.d_phi(), keys.d_phi(), *d_masks
        return None, *tree_leaves((*found, (None, d_outer, d_total)))


def _attention(*arguments: Any) -> tuple[Tensor, ...]:
    return _by_blocks(*arguments)[0]


def _attend_to_logs(q, k, v, outer, total, rows, log_scale, key_mask, segments) -> tuple[Tensor, ...]:
    """Output, log d and sums after some rows from their log-features, with one offset per pair."""
    arguments = q, k, v, Features, Features, None, key_mask, segments, log_scale, outer, total
    _, out, log_d, _, *after = _attend(rows, True, *arguments)
    return out, log_d, *after


def _backward(tiles: _Tiles, state: Sums, g, shift, log_d, d_outer, d_total) -> tuple[Tensor, ...]:
    """Gradients of the log-features and values of some rows and of the sums before them, from the gradients g of the
    output and those of the sums after them. `shift` is gᵀout - ∂log d; log_d is inf for rows without any weight.
    """
    (heads, length), (kv_heads, size) = g.shape[1:3], tiles.v.shape[1:4:2]
    q, k, v = tiles.q.log, tiles.k.log, tiles.v
    g, shift, log_d = (into_tiles(z, size, kv_heads, f) for z, f in ((g, 0.0), (shift, 0.0), (log_d, torch.inf)))

    # pairs within tiles
    q_scale, k_scale = q.amax(-1, keepdim=True), k.amax(-1, keepdim=True)
    offsets = exp_of_difference(k_scale.mT + tiles.pairs, log_d - q_scale)
    phi, psi = exp_of_difference(q, q_scale), exp_of_difference(k, k_scale)
    d_v = (phi @ psi.mT).mul_(offsets).mT @ g
    pairs = (g @ v.mT).sub_(shift).mul_(offsets)  # e_ij / d_i
    d_q, d_k = (pairs @ psi).mul_(phi), (pairs.mT @ phi).mul_(psi)

    # queries and the sums before their tile
    before, _, psi, decay = tiles.running_sums(state)
    read = q + before.log_scale
    if tiles.mine is not None:
        read = read.masked_fill(~tiles.mine, -torch.inf)
    phi = exp_of_difference(read, log_d)
    d_q.addcmul_((g @ before.outer.mT).addcmul_(shift, before.total.mT, value=-1), phi)

    # keys and the gradient of the sums after theirs
    outers, d_outer = decayed_sums(phi.mT @ g, decay, d_outer, backward=True)
    totals, d_total = decayed_sums((phi * shift).sum(-2).neg_().unsqueeze(-1), decay, d_total, backward=True)
    d_v += psi @ outers
    d_k.addcmul_((v @ outers.mT).add_(totals.mT), psi)
    d_k, d_v = (from_tiles(d, kv_heads, length) for d in (d_k, d_v))
    return from_tiles(d_q, heads, length), d_k, d_v, d_outer, d_total
