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

from .autograd import differentiate, gradients_of, keep, kept, recompute, traced
from .linear import (
    FeatureFunction,
    FeatureGradients,
    Features,
    Sums,
    blocks,
    compute_dtype,
    floored,
    split,
)
from .softmax import exp_of_difference
from .tiles import from_tiles, into_tiles

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
    """Attention `[B, H, L, Dv]`, log d `[B, H, L, 1]`, and the sums after the last key.

    Query i of q `[B, H, L, D]` sees the keys j ≤ i of k `[B, Hkv, L, D]` and v `[B, Hkv, L, Dv]` and those in `sums`.
    `key_mask` `[B, L]`: True for keys that exist. `segments`: numbers of packed sequences, `[B, L]` of queries and of
    keys, each contiguous; a query sees keys of its own number alone, and `sums` belong to the first. O(L · (TILE
    · (M + D) + M · D)) time, O(L · D) memory.
    """
    sums = Sums.before(phi_k, v) if sums is None else sums
    arguments = q, k, v, phi_q, phi_k, key_mask, segments, tuple(sums.tensors())
    if q.shape[2] == 1:  # a step of generation
        x, y, u = (z.to(compute_dtype(q)) for z in (q, k, v))
        context = Context.of(slice(0, 1), key_mask, segments)
        out, log_d, *after = _attend_by_steps(phi_q(x), phi_k(y), u, context, sums, phi_q.floor)
        return out.to(q.dtype), log_d, Sums(*after)
    if not phi_q.positive or traced():
        out, log_d, *after = _attention(*arguments)
    elif (found := differentiate(_CausalAttention, *arguments)) is not None:
        out, log_d, *after = found
    else:
        out, log_d, *after = _forward(*arguments)[0]
    return out, log_d, Sums(*after)


def _attention(q, k, v, phi_q, phi_k, key_mask, segments, sums) -> tuple[Tensor, ...]:
    """By autograd, block by block; for compilers in one block."""
    rows = _blocks(q, phi_k)
    outs, logs = [], []
    for r, x, y, u in zip(rows, *(split(z, rows) for z in (q, k, v)), strict=True):
        out, log_d, *sums = recompute(_map_and_attend, x, y, u, phi_q, phi_k, Context.of(r, key_mask, segments), *sums)
        outs.append(out)
        logs.append(log_d)
    return torch.cat(outs, 2), torch.cat(logs, 2), *sums


def _map_and_attend(x, y, u, phi_q, phi_k, context, *sums) -> tuple[Tensor, ...]:
    dtype = compute_dtype(x)
    q, k = phi_q(x.to(dtype)), phi_k(y.to(dtype))
    _, out, *others = _attend_block(q, k, u.to(dtype), context, Sums(*sums), phi_q.floor)
    return out.to(x.dtype), *others


def linear_multiply_adds(length: int, features: int, value_dim: int, causal: bool) -> int:
    """Multiply-adds of linear attention for one head, features given: the sums, and pairs within tiles if causal."""
    sums = 2 * length * features * (value_dim + 1)
    return sums + length * min(length, TILE) * (features + value_dim) if causal else sums


class Context(NamedTuple):
    """What some rows see: their part of the masks."""

    visible: Tensor | None = None  # [B, 1, L, 1]
    segments: tuple[Tensor, Tensor, Tensor] | None = None  # of queries and keys [B, L], and of the key before [B, 1]

    @staticmethod
    def of(rows: slice, key_mask: Tensor | None, segments: tuple[Tensor, Tensor] | None) -> "Context":
        visible = None if key_mask is None else key_mask[:, None, rows, None]
        if segments is None:
            return Context(visible)
        start = max(rows.start - 1, 0)
        queries, keys = segments
        return Context(visible, (queries[:, rows], keys[:, rows], keys[:, start : start + 1]))


def _blocks(q: Tensor, phi: FeatureFunction) -> list[slice]:
    """Sums, one a block, are no larger than the values."""
    B, H, L, D = q.shape
    width = max(D, phi.size)
    return blocks(L, B * H * max(width, TILE), width, q.device, TILE)


class _Tiles(NamedTuple):
    """A block in tiles: T of C positions, the G query heads that share a key head in one tile."""

    q: Features  # [B, Hkv, T, G·C, M]
    k: Features  # [B, Hkv, T, C, M], zero where there is no key
    v: Tensor  # [B, Hkv, T, C, Dv]
    allowed: Tensor  # pairs, [B or 1, 1, T or 1, C, C]
    entering: Features  # k, without those that no later tile may see
    ended: Tensor | None  # [B, 1, T, 1, 1], True for tiles that no key before them goes on beyond
    mine: Tensor | None  # [B, 1, T, G·C, 1], queries that may read the sums before their tile

    @staticmethod
    def of(q: Features, k: Features, v: Tensor, context: Context) -> "_Tiles":
        """From rows `[B, H, L, …]`, filled up to whole tiles."""
        length, groups = k.log.shape[2], q.log.shape[1] // k.log.shape[1]
        size = TRACED_TILE if traced() else min(TILE, length)
        k = k.only(context.visible)
        k = Features(into_tiles(k.log, size, -torch.inf), None if k.factor is None else into_tiles(k.factor, size))
        q, v = q.map(lambda z: _grouped_tiles(z, size, v.shape[1])), into_tiles(v, size)
        pair = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()[None, None, None]
        if context.segments is None:
            return _Tiles(q, k, v, pair, k, None, None)
        *both, before = context.segments
        # [B, T, C]; behind the end there is neither a query nor a key
        own, theirs = (into_tiles(s[:, None, :, None], size)[:, 0, ..., 0] for s in both)
        last = torch.cat([before.unsqueeze(2), theirs[:, :, -1:]], dim=1)  # of the keys before each tile
        entering = k.only((theirs == last[:, 1:])[:, None, :, :, None])
        ended = (last[:, 1:] != last[:, :-1])[:, None, :, :, None]
        mine = (own == last[:, :-1]).repeat(1, 1, groups)[:, None, :, :, None]
        pair = pair & (own.unsqueeze(-1) == theirs.unsqueeze(-2))[:, None]
        return _Tiles(q, k, v, pair, entering, ended, mine)

    def queries(self, x: Tensor, value: float) -> Tensor:
        """What queries have, `[B, H, L, …]`, in tiles that are filled up with a value."""
        return _grouped_tiles(x, self.v.shape[3], self.v.shape[1], value)

    def rows(self, x: Tensor, heads: int, length: int) -> Tensor:
        """From tiles of queries (or of keys, for key heads) back to `[B, H, L, …]`."""
        if heads != x.shape[1]:
            x = x.unflatten(3, (heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)
        return from_tiles(x, length)

    def repeated(self, x: Tensor) -> Tensor:
        """What belongs to pairs or rows of a tile, once for each of the query heads of a group."""
        groups = self.q.log.shape[3] // self.k.log.shape[3]
        return x if groups == 1 else x.repeat(1, 1, 1, groups, 1)

    def scales(self, sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
        """The scale of the sums before each tile, of those after it, `[B, Hkv, T, 1, M]`, and by how much the first
        shrink to become part of the second, `[B, Hkv, T, M, 1]`.
        """
        new = self.entering.log.detach().amax(-2, keepdim=True)
        first = sums.log_scale.detach().unsqueeze(2)
        if self.ended is None:
            all_ = torch.cat([first, new], dim=2).cummax(2).values
            before, after = all_[:, :, :-1], all_[:, :, 1:]
            return before, after, exp_of_difference(before, after).mT
        befores, afters = [], []
        for t in range(new.shape[2]):
            befores.append(first)
            first = torch.maximum(first.masked_fill(self.ended[:, :, t : t + 1], -torch.inf), new[:, :, t : t + 1])
            afters.append(first)
        before, after = torch.cat(befores, 2), torch.cat(afters, 2)
        return before, after, exp_of_difference(before, after).masked_fill(self.ended, 0).mT

    def running_sums(self, sums: Sums) -> tuple[Tensor, Tensor, Tensor, Sums]:
        """The sums before each tile, as scale `[B, Hkv, T, 1, M]`, outer and total; and those after all."""
        if traced():
            return self._running_sums_by_pairs(sums)
        before, after, decay = self.scales(sums)
        phi = self.entering.divided(after)
        outers, outer = decayed_sums(phi.mT @ self.v, decay, sums.outer)
        totals, total = decayed_sums(phi.sum(-2).unsqueeze(-1), decay, sums.total)
        return before, outers, totals, Sums(after[:, :, -1].clone(), outer, total)

    def _running_sums_by_pairs(self, sums: Sums) -> tuple[Tensor, Tensor, Tensor, Sums]:
        """The same without a loop: the sums of each tile by itself, weighted for each of those after it."""
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
        last = Sums(largest[:, :, -1], outer[:, :, -1], total[:, :, -1])
        return largest[:, :, :-1], outer[:, :, :-1], total[:, :, :-1], last


def _grouped_tiles(x: Tensor, size: int, kv_heads: int, value: float = 0.0) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, T, G·C, E]`, filled up with a value."""
    tiles = into_tiles(x, size, value)
    return tiles if x.shape[1] == kv_heads else tiles.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3, 4)


def decayed_sums(terms: Tensor, decay: Tensor, start: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """s ← terms_t + decay_t · s along dimension 2: the sum before each step, and the one after all of them."""
    step = -1 if backward else 1
    sums = [start]
    for term, factor in list(zip(terms.unbind(2), decay.unbind(2), strict=True))[::step]:
        sums.append(torch.addcmul(term, factor, sums[-1]))
    last = sums.pop()
    return torch.stack(sums[::step], dim=2), last


def _attend_tiles(tiles: _Tiles, sums: Sums, floor: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Output and denominator of queries in tiles, the latter as (d, scale) with d · exp(scale); and the sums after."""
    q, k, v = tiles[:3]
    before, outers, totals, last = tiles.running_sums(sums)
    q_scale, k_scale = (z.log.detach().amax(-1, keepdim=True) for z in (q, k))
    pair_scale = tiles.repeated(k_scale.mT.masked_fill(~tiles.allowed, -torch.inf))  # c_j
    read = Features(q.log + before, q.factor).only(tiles.mine)
    scale = torch.maximum(pair_scale.amax(-1, keepdim=True) + q_scale, read.log.detach().amax(-1, keepdim=True))

    offsets = exp_of_difference(pair_scale, scale - q_scale)
    weights = (q.divided(q_scale) @ k.divided(k_scale).mT).mul_(offsets)
    phi = read.divided(scale)
    numerator = weights @ v + phi @ outers
    denominator = weights.sum(-1, keepdim=True) + (phi * totals.mT).sum(-1, keepdim=True)
    least = None
    if floor is not None:
        pair_logs = tiles.repeated(k.log.mT.masked_fill(~tiles.allowed, -torch.inf)) + q.log
        weight = exp_of_difference(pair_logs, scale).sum(-1, keepdim=True)
        weight = weight + exp_of_difference(read.log, scale) * totals[..., -1:, :]
        least = floor.to(weight).unsqueeze(-1) * weight
    return numerator / floored(denominator, least), denominator, scale, last


def _attend_block(
    q: Features, k: Features, v: Tensor, context: Context, sums: Sums, floor: Tensor | None
) -> tuple[Tensor, ...]:
    """Output, log d and sums after some rows, behind the queries that see keys but whose products of features have all
    underflowed.
    """
    heads, length = q.log.shape[1:3]
    tiles = _Tiles.of(q, k, v, context)
    out, d, scale, after = _attend_tiles(tiles, sums, floor)
    few = d < torch.finfo(d.dtype).tiny * 2**24  # has lost digits
    log_d = scale + d.masked_fill(few, 1.0).log().masked_fill(few, -torch.inf)
    out, log_d = tiles.rows(out, heads, length), tiles.rows(log_d, heads, length)
    return few & (scale > -torch.inf), out, log_d, *after.tensors()


def _attend_by_steps(
    q: Features, k: Features, u: Tensor, context: Context, state: Sums, floor: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The same key by key, as in generation: exact whatever the size of the features, and slow."""
    k, before = k.only(context.visible), None
    outs, logs = [], []
    for t in range(u.shape[2]):
        now = slice(t, t + 1)
        if context.segments is not None:
            own, theirs, first = (s[:, :, None, None] for s in context.segments)
            same = theirs[:, now] == (first if before is None else before)
            state = Sums(state.log_scale.masked_fill(~same, -torch.inf), state.outer * same, state.total * same)
            before = theirs[:, now]
        state = state.plus(Sums.of(k.rows(now), u[:, :, now]))
        query = q.rows(now)
        out, log = state.read(query, floor), state.log_sum(query)
        if before is not None:
            mine = own[:, now] == before
            out, log = out * mine, log.masked_fill(~mine, -torch.inf)
        outs.append(out)
        logs.append(log)
    return torch.cat(outs, 2), torch.cat(logs, 2), *state.tensors()


class _Piece(NamedTuple):
    """Some rows that were computed at once, and the sums before them."""

    rows: slice
    by_steps: bool
    sums: tuple[Tensor, ...]


def _forward(q, k, v, phi_q, phi_k, key_mask, segments, sums) -> tuple[tuple[Tensor, ...], list[_Piece]]:
    """Output, log d and the sums after the last key; and how it was cut.

    Where products of features underflow in a block, it is cut into tiles, and such tiles into steps.
    """
    out = q.new_empty(*q.shape[:3], v.shape[3])
    log_d = q.new_empty(*q.shape[:3], 1, dtype=compute_dtype(q))
    pieces, todo = [], _blocks(q, phi_k)[::-1]
    while todo:
        rows = todo.pop()
        x, y, u = (z[:, :, rows].to(log_d.dtype) for z in (q, k, v))
        context = Context.of(rows, key_mask, segments)
        found: Any
        lost, *found = _attend_block(phi_q(x), phi_k(y), u, context, Sums(*sums), phi_q.floor)
        by_steps = bool(lost.any())
        if by_steps and rows.stop - rows.start > TILE:
            todo += [slice(s, min(s + TILE, rows.stop)) for s in range(rows.start, rows.stop, TILE)][::-1]
            continue
        if by_steps:
            found = _attend_by_steps(phi_q(x), phi_k(y), u, context, Sums(*sums))
        pieces.append(_Piece(rows, by_steps, sums))
        out[:, :, rows], log_d[:, :, rows], *after = found
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
        q, k, v, phi_q, phi_k, key_mask, segments, _ = arguments
        queries, keys = FeatureGradients(phi_q), FeatureGradients(phi_k)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        log_d = log_d.masked_fill(log_d == -torch.inf, torch.inf)  # no weight
        for number, (rows, by_steps) in reversed(list(enumerate(ctx.pieces))):
            state = Sums(*states[3 * number : 3 * number + 3])
            context = Context.of(rows, key_mask, segments)
            g, u, o, x, y, log, d_log = (z[:, :, rows] for z in (gradient, v, out, q, k, log_d, d_log_d))
            lx, ly = queries.logs(x), keys.logs(y)
            g, u = g.to(log.dtype), u.to(log.dtype)
            found: Any
            if by_steps:
                found = _backward_by_steps(lx, ly, u, context, state, (g, d_log, d_outer, d_total))
            else:
                shift = (g * o).sum(-1, keepdim=True) - d_log
                found = _backward_of_tiles(lx, ly, u, context, state, g, shift, log, d_outer, d_total)
            d_lx, d_ly, dv[:, :, rows], d_outer, d_total = found
            dq[:, :, rows], dk[:, :, rows] = queries.pull(d_lx), keys.pull(d_ly)
        d_tokens = dq if queries.used else None, dk if keys.used else None
        d_segments, d_sums = None if segments is None else (None, None), (None, d_outer, d_total)
        return None, *tree_leaves((*d_tokens, dv, queries.found(), keys.found(), None, d_segments, d_sums))


def _backward_by_steps(lx, ly, u, context, state, gradients) -> list[Any]:
    """Gradients of log-features, values and sums before, from those of output, log d and sums after."""
    leaves = [z.detach().requires_grad_() for z in (lx, ly, u, state.outer, state.total)]

    def steps(lx: Tensor, ly: Tensor, u: Tensor, outer: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        out, log_d, _, *after = _attend_by_steps(
            Features(lx), Features(ly), u, context, Sums(state.log_scale, outer, total)
        )
        return out, log_d, *after

    return [
        torch.zeros_like(x) if d is None else d
        for x, d in zip(leaves, gradients_of(steps, leaves, gradients), strict=True)
    ]


def _backward_of_tiles(lx, ly, u, context, state, g, shift, log_d, d_outer, d_total) -> tuple[Tensor, ...]:
    """The same for rows in tiles; `shift` is gᵀout - ∂log d, log_d is inf for rows without any weight."""
    heads, length = lx.shape[1], lx.shape[2]
    tiles = _Tiles.of(Features(lx), Features(ly), u, context)
    q, k, v = tiles.q.log, tiles.k.log, tiles.v
    g, shift, log_d = (tiles.queries(z, f) for z, f in ((g, 0.0), (shift, 0.0), (log_d, torch.inf)))

    # pairs within tiles
    q_scale, k_scale = (z.amax(-1, keepdim=True) for z in (q, k))
    pair_scale = tiles.repeated(k_scale.mT.masked_fill(~tiles.allowed, -torch.inf))
    offsets = exp_of_difference(pair_scale, log_d - q_scale)
    phi, psi = exp_of_difference(q, q_scale), exp_of_difference(k, k_scale)
    d_v = (phi @ psi.mT).mul_(offsets).mT @ g
    pairs = (g @ v.mT).sub_(shift).mul_(offsets)  # e_ij / d_i
    d_q, d_k = (pairs @ psi).mul_(phi), (pairs.mT @ phi).mul_(psi)

    # queries and the sums before their tile
    before, after, decay = tiles.scales(state)
    psi = exp_of_difference(tiles.entering.log, after)
    outers, _ = decayed_sums(psi.mT @ v, decay, state.outer)
    totals, _ = decayed_sums(psi.sum(-2).unsqueeze(-1), decay, state.total)
    phi = exp_of_difference(Features(q + before).only(tiles.mine).log, log_d)
    d_q.addcmul_((g @ outers.mT).addcmul_(shift, totals.mT, value=-1), phi)

    # keys and the gradient of the sums after theirs
    outers, d_outer = decayed_sums(phi.mT @ g, decay, d_outer, backward=True)
    totals, d_total = decayed_sums((phi * shift).sum(-2).neg_().unsqueeze(-1), decay, d_total, backward=True)
    d_v += psi @ outers
    d_k.addcmul_((v @ outers.mT).add_(totals.mT), psi)
    kv_heads = u.shape[1]
    d_q, d_k, d_v = (tiles.rows(d, h, length) for d, h in ((d_q, heads), (d_k, kv_heads), (d_v, kv_heads)))
    return d_q, d_k, d_v, d_outer, d_total
