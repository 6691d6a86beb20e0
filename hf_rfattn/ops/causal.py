"""Linear attention where a query sees the keys before it and its own, in tiles of positions.

Pairs within a tile are computed one by one; all before it is read from the running sums S and z. Three offsets keep
every number near one: the sums hold, *for each feature*, the largest log-feature they have seen, so that the feature
that matters most to a query is never lost; inside a tile each key is scaled by its own largest log-feature c_j; and
each query by the largest scale among the sums and keys it sees. Neither padding nor the future enters any of them. No
epsilon anywhere. Offsets are constants to autograd: they cancel.

Backward by hand: with d_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j), weights P_ij = φ(x_i)ᵀφ(y_j) / d_i and g the gradient of out,

    ∂φ(x_i) = Σ_{j≤i} φ(y_j) e_ij / d_i,  ∂φ(y_j) = Σ_{i≥j} φ(x_i) e_ij / d_i,  e_ij = g_iᵀ(v_j - out_i) + ∂log d_i,

and ∂v_j = Σ_{i≥j} P_ij g_i. Beyond a tile ∂φ(x) reads the running sums of forward, and ∂φ(y) and ∂v the gradient of
those sums, which runs from the last tile to the first on the same scales.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from . import backend, fused
from .autograd import differentiate, gradients_of, keep, kept, recompute
from .linear import FeatureFunction, FeatureGradients, Features, Sums, compute_dtype, floored
from .softmax import exp_of_difference
from .tiles import block_size, from_tiles, into_tiles, traced

TILE = 64  # positions whose pairs are computed one by one
TRACED_TILE = 128  # the same for compilers, which cannot loop over tiles: their sums meet each other in pairs


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
    """out_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j) v_j / d_i, `[B, H, L, Dv]`; log d_i, `[B, H, L, 1]`, d_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j);
    and the sums after the last key.

    Query i of q `[B, H, L, D]` sees the keys j ≤ i of k `[B, Hkv, L, D]` and v `[B, Hkv, L, Dv]` and those in `sums`.
    `key_mask` `[B, L]`: True for keys that exist. `segments`: numbers of packed sequences, `[B, L]` of queries and of
    keys, each contiguous; a query sees keys of its own number alone, and `sums` belong to the first. O(L · (TILE
    · (M + D) + M · D)) time, O(L · D) memory.
    """
    if sums is None:
        sums = Sums.of_none(
            phi_k, (v.shape[0], v.shape[1], v.shape[3]), torch.promote_types(v.dtype, torch.float32), v.device
        )
    masks = key_mask, segments
    arguments = q, k, v, phi_q, phi_k, masks, (sums.log_scale, sums.outer, sums.total)
    if q.shape[2] == 1:  # a step of generation
        x, y, u = q.to(sums.outer.dtype), k.to(sums.outer.dtype), v.to(sums.outer.dtype)
        block = _Block.of(slice(0, 1), phi_q(x), phi_k(y), u, *masks)
        out, log_d, *after = _attend_by_steps(block, sums, phi_q.floor)
        out = out.to(q.dtype)
    elif q.device.type in backend.DEVICES and _fused(arguments[:5]):
        out, log_d, *after = fused.causal_linear_attention(q, k, v, phi_q, phi_k, *masks, arguments[-1])
    elif not phi_q.positive or traced():
        out, log_d, *after = _attention(*arguments)
    elif torch.is_grad_enabled() and (found := differentiate(_CausalAttention, *arguments)) is not None:
        out, log_d, *after = found
    else:
        (out, log_d, *after), _ = _forward(*arguments)
    return out, log_d, Sums(*after)


def _fused(arguments: tuple[Any, ...]) -> bool:
    problem = None if arguments[3].positive else "features are signed"
    if traced():
        problem = "kernels of flash-linear-attention cannot be part of a compiled graph"
    return backend.fused("causal", causal_linear_attention, arguments, problem)


def linear_multiply_adds(length: int, features: int, value_dim: int, causal: bool) -> int:
    """Multiply-adds of linear attention for one head, features given: the sums, and pairs within tiles if causal."""
    sums = 2 * length * features * (value_dim + 1)
    return sums + length * min(length, TILE) * (features + value_dim) if causal else sums


class _Block(NamedTuple):
    """Some rows: features of their queries and keys, values, and their part of the masks."""

    q: Features
    k: Features  # zero for keys that do not exist
    v: Tensor
    segments: tuple[Tensor, Tensor, Tensor] | None  # of queries and keys [B, L], and of the key before [B, 1]

    @staticmethod
    def of(rows: slice, q: Features, k: Features, v: Tensor, key_mask, segments) -> "_Block":
        """From features and values of the rows, and masks of the whole sequence."""
        if key_mask is not None:
            k = k._replace(log=k.log.masked_fill(~key_mask[:, None, rows, None], -torch.inf))
        if segments is not None:
            before = slice(max(rows.start - 1, 0), max(rows.start, 1))
            segments = segments[0][:, rows], segments[1][:, rows], segments[1][:, before]
        return _Block(q, k, v, segments)


def _attention(q, k, v, phi_q, phi_k, masks, sums) -> tuple[Tensor, ...]:
    """By autograd, block by block; for compilers in one block."""
    size, start = block_size(q, 2 * max(q.shape[3], phi_k.size), phi_k.size, TILE), 0
    outs, logs = [], []
    parts = zip(*(z.split(size, dim=2) for z in (q, k, v)), strict=True) if size < q.shape[2] else [(q, k, v)]
    for x, y, u in parts:
        rows = slice(start, start + x.shape[2])
        out, log_d, *sums = recompute(_map_and_attend, rows, x, y, u, phi_q, phi_k, masks, *sums)
        outs.append(out)
        logs.append(log_d)
        start = rows.stop
    return torch.cat(outs, 2), torch.cat(logs, 2), *sums


def _map_and_attend(rows, x, y, u, phi_q, phi_k, masks, *sums) -> tuple[Tensor, ...]:
    dtype = compute_dtype(x)
    block = _Block.of(rows, phi_q(x.to(dtype)), phi_k(y.to(dtype)), u.to(dtype), *masks)
    _, out, *others = _attend_block(block, Sums(*sums), phi_q.floor)
    return out.to(x.dtype), *others


class _Tiles(NamedTuple):
    """A block in tiles: T of C positions, the G query heads that share a key head in one tile."""

    q: Features  # [B, Hkv, T, G·C, M]
    k: Features  # [B, Hkv, T, C, M], zero where there is no key
    v: Tensor  # [B, Hkv, T, C, Dv]
    pairs: Tensor  # [B or 1, 1, T or 1, G·C, C], 0 for pairs that count, -inf for others
    entering: Features  # k, without those that no later tile may see
    ended: Tensor | None  # [B, 1, T, 1, 1], True for tiles that no key before them goes on beyond
    mine: Tensor | None  # [B, 1, T, G·C, 1], queries that may read the sums before their tile

    @staticmethod
    def of(block: _Block) -> "_Tiles":
        (heads, length), kv_heads = block.q.log.shape[1:3], block.v.shape[1]
        size = TRACED_TILE if traced() else min(TILE, length)
        q = Features(into_tiles(block.q.log, size, kv_heads))
        k, v = Features(into_tiles(block.k.log, size, kv_heads, -torch.inf)), into_tiles(block.v, size, kv_heads)
        if block.q.factor is not None and block.k.factor is not None:
            q = q._replace(factor=into_tiles(block.q.factor, size, kv_heads))
            k = k._replace(factor=into_tiles(block.k.factor, size, kv_heads))
        pair = torch.ones(size, size, dtype=torch.bool, device=v.device).tril().repeat(heads // kv_heads, 1)
        if block.segments is None:
            return _Tiles(q, k, v, torch.where(pair, 0.0, -torch.inf)[None, None, None], k, None, None)
        *both, before = block.segments
        # [B, T, C]; behind the end there is neither a query nor a key
        own, theirs = (into_tiles(s[:, None, :, None], size, 1)[:, 0, ..., 0] for s in both)
        last = torch.cat([before.unsqueeze(2), theirs[:, :, -1:]], dim=1)  # of the keys before each tile
        enters = (theirs == last[:, 1:])[:, None, :, :, None]
        ended = (last[:, 1:] != last[:, :-1])[:, None, :, :, None]
        own = own.repeat(1, 1, heads // kv_heads)
        mine = (own == last[:, :-1])[:, None, :, :, None]
        pair = pair & (own.unsqueeze(-1) == theirs.unsqueeze(-2))[:, None]
        entering = k._replace(log=k.log.masked_fill(~enters, -torch.inf))
        return _Tiles(q, k, v, torch.where(pair, 0.0, -torch.inf), entering, ended, mine)

    def running_sums(self, sums: Sums) -> tuple[Sums, Sums, Tensor, Tensor]:
        """The sums before each tile, `[B, Hkv, T, …]`, and those after all; φ of keys on the scale of the sums after
        their tile, and by how much the sums before it shrink to become part of those, `[B, Hkv, T, M, 1]`.
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
        """The sums before each tile and after all, without a loop: those of each tile by itself, weighted for each of
        those after it.
        """
        own = Sums.of(self.entering, self.v)
        scale, outer, total = (
            torch.cat([a.unsqueeze(2), b], dim=2) for a, b in zip(sums.tensors(), own.tensors(), strict=True)
        )  # of what came before, and of each tile
        steps = torch.arange(scale.shape[2], device=scale.device)
        seen = (steps <= steps[:, None])[None, None]  # [B, 1, T + 1, T + 1], in the sums after each of them
        if self.ended is not None:
            number = F.pad(self.ended.flatten(2).long().cumsum(2), (1, 0))  # [B, 1, T + 1]
            seen = seen & (number.unsqueeze(2) == number.unsqueeze(3))
        logs = scale.detach().transpose(2, 3).masked_fill(~seen.unsqueeze(-1), -torch.inf)  # [B, Hkv, T + 1, T + 1, M]
        largest = logs.amax(3, keepdim=True)
        weights = exp_of_difference(logs, largest).permute(0, 1, 4, 2, 3)  # [B, Hkv, M, T + 1, T + 1]
        weights = weights.expand(-1, -1, outer.shape[3], -1, -1)  # one scale may be that of all features
        outer, total = ((weights @ z.transpose(2, 3)).transpose(2, 3) for z in (outer, total))
        before = Sums(largest[:, :, :-1], outer[:, :, :-1], total[:, :, :-1])
        return before, Sums(largest[:, :, -1], outer[:, :, -1], total[:, :, -1])


def decayed_sums(terms: Tensor, decay: Tensor, start: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """s ← terms_t + decay_t · s along dimension 2: the sum before each step, and the one after all of them."""
    steps = range(terms.shape[2])
    if torch.is_grad_enabled():
        sums = [start]
        for t in steps:
            sums.append(torch.addcmul(terms[:, :, t], decay[:, :, t], sums[-1]))
        return torch.stack(sums[:-1], dim=2), sums[-1]
    before, shift = torch.empty_like(terms), -1 if backward else 1
    first, *others = steps[::shift]
    before[:, :, first] = start
    for t in others:
        last = t - shift
        torch.addcmul(terms[:, :, last], decay[:, :, last], before[:, :, last], out=before[:, :, t])
    last = steps[::shift][-1]
    return before, torch.addcmul(terms[:, :, last], decay[:, :, last], before[:, :, last])


def _attend_block(block: _Block, sums: Sums, floor: Tensor | None) -> tuple[Tensor, ...]:
    """Output, log d and sums after some rows, behind the queries that see keys but whose products of features have all
    underflowed.
    """
    tiles = _Tiles.of(block)
    q, k, v = tiles[:3]
    before, after = tiles.running_sums_by_pairs(sums) if traced() else tiles.running_sums(sums)[:2]
    q_scale, k_scale = q.log.detach().amax(-1, keepdim=True), k.log.detach().amax(-1, keepdim=True)
    pair_scale = k_scale.mT + tiles.pairs  # c_j
    read = q._replace(log=q.log + before.log_scale)
    if tiles.mine is not None:
        read = read._replace(log=read.log.masked_fill(~tiles.mine, -torch.inf))
    scale = torch.maximum(pair_scale.amax(-1, keepdim=True) + q_scale, read.log.detach().amax(-1, keepdim=True))

    offsets = exp_of_difference(pair_scale, scale - q_scale)
    weights = (q.divided(q_scale) @ k.divided(k_scale).mT).mul_(offsets)
    phi = read.divided(scale)
    numerator = (weights @ v).add_(phi @ before.outer)
    d = weights.sum(-1, keepdim=True) + torch.linalg.vecdot(phi, before.total.mT).unsqueeze(-1)
    least = None
    if floor is not None:
        weight = exp_of_difference(k.log.mT + tiles.pairs + q.log, scale).sum(-1, keepdim=True)
        weight = weight + exp_of_difference(read.log, scale) * before.total[..., -1:, :]
        least = floor.to(weight).unsqueeze(-1) * weight
    few = d < torch.finfo(d.dtype).tiny * 2**24  # has lost digits
    log_d = scale + d.masked_fill(few, 1.0).log().masked_fill(few, -torch.inf)
    heads, length = block.q.log.shape[1:3]
    d = d.masked_fill(few, torch.inf) if q.factor is None else floored(d, least)
    out, log_d = from_tiles(numerator / d, heads, length), from_tiles(log_d, heads, length)
    return few & (scale > -torch.inf), out, log_d, after.log_scale, after.outer, after.total


def _attend_by_steps(block: _Block, state: Sums, floor: Tensor | None = None) -> tuple[Tensor, ...]:
    """The same key by key, as in generation: exact whatever the size of the features, and slow."""
    outs, logs, before = [], [], None
    for t in range(block.v.shape[2]):
        now = slice(t, t + 1)
        q, k = block.q.rows(now), block.k.rows(now)
        if block.segments is not None:
            own, theirs, first = (s[:, :, None, None] for s in block.segments)
            same = theirs[:, now] == (first if before is None else before)
            state = Sums(state.log_scale.masked_fill(~same, -torch.inf), state.outer * same, state.total * same)
            before = theirs[:, now]
        state = state.plus(Sums.of(k, block.v[:, :, now]))
        out, log = state.read(q, floor), state.log_sum(q)
        if before is not None:
            mine = own[:, now] == before
            out, log = out * mine, log.masked_fill(~mine, -torch.inf)
        outs.append(out)
        logs.append(log)
    return torch.cat(outs, 2), torch.cat(logs, 2), state.log_scale, state.outer, state.total


class _Piece(NamedTuple):
    """Some rows that were computed at once, and the sums before them."""

    rows: slice
    by_steps: bool
    sums: tuple[Tensor, ...]


def _forward(q, k, v, phi_q, phi_k, masks, sums) -> tuple[tuple[Tensor, ...], list[_Piece]]:
    """Output, log d and the sums after the last key; and how it was cut.

    More tensors are in use at once than elsewhere, so blocks are half as long. Where products of features underflow, a
    block is cut into tiles, and such tiles into steps.
    """
    length, size = q.shape[2], block_size(q, 2 * max(q.shape[3], phi_k.size), phi_k.size, TILE)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    log_d = sums[1].new_empty(*q.shape[:3], 1)
    pieces: list[_Piece] = []
    todo = [(0, length, size)]  # from, to, in pieces of
    while todo:
        start, stop, size = todo.pop()
        rows = slice(start, min(start + size, stop))
        if rows.stop < stop:
            todo.append((rows.stop, stop, size))
        x, y, u = q[:, :, rows].to(log_d.dtype), k[:, :, rows].to(log_d.dtype), v[:, :, rows].to(log_d.dtype)
        block = _Block.of(rows, phi_q(x), phi_k(y), u, *masks)
        found: Any
        lost, *found = _attend_block(block, Sums(*sums), phi_q.floor)
        by_steps = bool(lost.any())
        if by_steps and rows.stop - rows.start > TILE:
            todo.append((rows.start, rows.stop, TILE))
            continue
        if by_steps:
            found = _attend_by_steps(block, Sums(*sums))
        pieces.append(_Piece(rows, by_steps, sums))
        part, part_d, *after = found
        if rows == slice(0, length):
            out, log_d = part.to(q.dtype), part_d
        else:
            out[:, :, rows], log_d[:, :, rows] = part, part_d
        sums = tuple(after)
    return (out, log_d, *sums), pieces


class _CausalAttention(torch.autograd.Function):
    """The gradients of attention by hand, those of the features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Any:
        found, pieces = _forward(*tree_unflatten(leaves, spec))
        out, log_d, log_scale, *_ = found
        ctx.pieces = [(piece.rows, piece.by_steps) for piece in pieces]
        keep(ctx, spec, leaves, out, log_d, *(z for piece in pieces for z in piece.sums))
        ctx.mark_non_differentiable(log_scale)
        return found

    @staticmethod
    def backward(ctx: Any, gradient, d_log_d, d_log_scale, d_outer, d_total) -> Any:
        arguments, (out, log_d, *states) = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, [gradient, d_log_d, d_log_scale, d_outer, d_total])
        q, k, v, phi_q, phi_k, (key_mask, segments), _ = arguments
        queries, keys = FeatureGradients(phi_q), FeatureGradients(phi_k)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        log_d = log_d.masked_fill(log_d == -torch.inf, torch.inf)  # no weight
        for number, (rows, by_steps) in reversed(list(enumerate(ctx.pieces))):
            state = Sums(*states[3 * number : 3 * number + 3])
            g, u, o, x, y, log, d_log = (z[:, :, rows] for z in (gradient, v, out, q, k, log_d, d_log_d))
            g, u = g.to(log.dtype), u.to(log.dtype)
            block = _Block.of(rows, Features(queries.logs(x)), Features(keys.logs(y)), u, key_mask, segments)
            if by_steps:
                found = _backward_by_steps(block, state, g, d_log, d_outer, d_total)
            else:
                shift = torch.linalg.vecdot(g, o.to(g.dtype)).unsqueeze(-1) - d_log
                found = _backward_of_tiles(block, state, g, shift, log, d_outer, d_total)
            d_lx, d_ly, dv[:, :, rows], d_outer, d_total = found
            dq[:, :, rows], dk[:, :, rows] = queries.pull(d_lx), keys.pull(d_ly)
        d_tokens = dq if queries.used else None, dk if keys.used else None
        d_masks = None, None if segments is None else (None, None)
        return None, *tree_leaves((*d_tokens, dv, queries.found(), keys.found(), d_masks, (None, d_outer, d_total)))


def _backward_by_steps(block: _Block, state: Sums, g, d_log, d_outer, d_total) -> Any:
    """Gradients of log-features, values and sums before, from those of output, log d and sums after."""
    leaves = [z.detach().requires_grad_() for z in (block.q.log, block.k.log, block.v, state.outer, state.total)]

    def steps(q: Tensor, k: Tensor, v: Tensor, outer: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        rows = _Block(Features(q), Features(k), v, block.segments)
        out, log_d, _, *after = _attend_by_steps(rows, Sums(state.log_scale, outer, total))
        return out, log_d, *after

    found = gradients_of(steps, leaves, [g, d_log, d_outer, d_total])
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]


def _backward_of_tiles(block: _Block, state: Sums, g, shift, log_d, d_outer, d_total) -> tuple[Tensor, ...]:
    """The same for rows in tiles; `shift` is gᵀout - ∂log d, log_d is inf for rows without any weight."""
    tiles, (heads, length), kv_heads = _Tiles.of(block), block.q.log.shape[1:3], block.v.shape[1]
    q, k, v = tiles.q.log, tiles.k.log, tiles.v
    g, shift, log_d = (into_tiles(z, v.shape[3], kv_heads, f) for z, f in ((g, 0.0), (shift, 0.0), (log_d, torch.inf)))

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
