"""Linear attention where a query sees the keys before it and its own, with positive features: backward by hand.

With d_i = Σ_{j≤i} φ(x_i)ᵀφ(y_j) and the weights P_ij = φ(x_i)ᵀφ(y_j) / d_i, out_i = Σ_{j≤i} P_ij v_j; and with g the
gradient of out,

    ∂φ(x_i) = Σ_{j≤i} φ(y_j) e_ij / d_i,  ∂φ(y_j) = Σ_{i≥j} φ(x_i) e_ij / d_i,  e_ij = g_iᵀ(v_j - out_i),

and ∂v_j = Σ_{i≥j} P_ij g_i. Pairs within a tile are computed one by one. Beyond it ∂φ(x) reads the running state of
forward, and ∂φ(y) and ∂v the gradient of that state, which runs from the last tile to the first on the same scales:
for a query, d_i and the scales of the state before its tile; for a key, those of the state that takes it in. So no
power is above one there, as in forward. Training keeps the inputs, the output, log d, and the state before each block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import FarField, Rows, block_length, no_keys, slices
from .blockwise import Tiling, attend_in_blocks
from .gradients import FeatureGradients
from .inputs import Inputs
from .linear_attention import (
    TILE,
    Features,
    State,
    attend_tiles,
    decayed_sums,
    repeat_rows,
    running_scales,
    running_states,
)
from .partial import Partial, exp_less, normalise, underflowed
from .scratch import fresh, product, scratch
from .tiles import into_tiles, queries_from_tiles


def attend_to_past(
    inputs: Inputs, far: FarField, state: State | None = None, held: Sequence[Tensor] = ()
) -> tuple[Tensor, State]:
    """Attention `[B, H, L, D]` of causal inputs after the keys in `state`, and the state after the last key.

    `held` are all parameters and buffers that the features read.
    """
    state = no_keys(inputs, far) if state is None else state
    if torch.compiler.is_compiling():
        out, (after,) = attend_in_blocks(inputs, lambda p, _: normalise(p[0]), far=[far], states=[state], held=held)
        return out, after
    tensors = (inputs.q, inputs.k, inputs.v, *state, *held)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out, *new = _AttendToPast.apply(inputs[3:], far, *tensors)
        return out, State(*new)
    with torch.no_grad():
        out, _, states = _attend(inputs, far, state)
    return out, states[-1]


def _attend(inputs: Inputs, far: FarField, state: State) -> tuple[Tensor, Tensor, list[State]]:
    """The output, log d `[B, H, L, 1]`, and the states before each block and after the last."""
    q, k, v = inputs[:3]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    log_d = q.new_empty(*q.shape[:3], 1, dtype=inputs.dtype)
    states = [state]
    tiling, blocks = _blocks(inputs, far)
    for rows in blocks:
        with scratch(q):
            x, y = (z[:, :, rows].to(inputs.dtype) for z in (q, k))
            lx, ly = far.queries(x, inputs.root).log, far.keys(y, inputs.root).log
            tiles = _Tiles.of(tiling, rows, lx, ly, inputs.value(v[:, :, rows]))
            runs, state = running_states(Features(tiles.entering), tiles.v, state, tiles.ended)
            states.append(state)
            beyond = [(runs, tiles.mine)]
            part = attend_tiles(Features(tiles.q), Features(tiles.k), tiles.v, tiles.allowed, 0, 0, beyond)
            part = Partial(*(queries_from_tiles(z, x.shape[1], x.shape[2]) for z in part))
            log_d[:, :, rows] = _log_denominator(part)
            if out.dtype == inputs.dtype:
                normalise(part, out=out[:, :, rows])
            else:
                out[:, :, rows] = normalise(part)
    return out, log_d, states


def _blocks(inputs: Inputs, far: FarField) -> tuple[Tiling, list[slice]]:
    B, H, L, D = inputs.q.shape
    size, width = min(TILE, L), max(D, far.num_features)
    # states, one a block, are no larger than the values
    block = block_length(L, B * H * max(width, size), width, size, inputs.q.device)
    return Tiling(inputs, size, 0, 0, None, False, None), slices(L, block)


def _log_denominator(part: Partial) -> Tensor:
    """log d, so large that no weight overflows where d nearly underflows; inf, for no weight, where out is zero."""
    least = torch.finfo(part.denominator.dtype).tiny * 2**24
    log = part.denominator.clamp(min=least).log().add_(part.log_scale)
    return log.masked_fill_(underflowed(part.denominator), torch.inf)


class _Tiles(NamedTuple):
    """The tiles of a block, `[B, Hkv, T, G·C, …]` of queries and `[B, Hkv, T, C, …]` of keys; q and k are logarithms of
    features.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor  # pairs
    entering: Tensor  # k, without those that no later tile may see
    ended: Tensor | None  # as in `running_states`
    mine: Tensor | None  # queries that may read the state before their tile

    @staticmethod
    def of(tiling: Tiling, rows: slice, lx: Tensor, ly: Tensor, v: Tensor) -> "_Tiles":
        ly, v = (into_tiles(tiling.filled(z), tiling.size) for z in (ly, v))
        visible = tiling.visible(rows, tiling.far_mask)
        k = Features(ly) if visible is None else Features(ly).only(into_tiles(visible, tiling.size))
        entering, ended, mine = tiling.borders(k, rows, 0, False)
        return _Tiles(tiling.queries(lx), k.log, v, tiling.pairs(rows, None, 0, 0), entering.log, ended, mine)

    @property
    def groups(self) -> int:
        return self.q.shape[3] // self.k.shape[3]


class _AttendToPast(torch.autograd.Function):
    """The gradients of attention by hand, those of the features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, known: tuple, far: FarField, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        out, log_d, states = _attend(Inputs(q, k, v, *known), far, State(*tensors[:3]))
        ctx.known, ctx.far, ctx.blocks = known, far, len(states) - 1
        ctx.save_for_backward(q, k, v, out, log_d, *(z for state in states[:-1] for z in state), *tensors[3:])
        ctx.mark_non_differentiable(states[-1].log_scale)
        return out, *states[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor, d_outer: Tensor, d_total: Tensor) -> Any:
        q, k, v, out, log_d, *others = ctx.saved_tensors
        inputs, far = Inputs(q, k, v, *ctx.known), ctx.far
        maps = FeatureGradients(others[3 * ctx.blocks :], ctx.needs_input_grad[8:])
        dq, dk, dv = (Rows(x.shape[:3], x.shape[3], x) for x in (q, k, v))
        tiling, blocks = _blocks(inputs, far)
        with torch.autocast(q.device.type, enabled=False):
            for number, rows in reversed(list(enumerate(blocks))):
                state = State(*others[3 * number : 3 * number + 3])
                length = rows.stop - rows.start
                with scratch(q):
                    lx, back_q = maps.features(q[:, :, rows], lambda x: far.queries(x.to(inputs.dtype), inputs.root))
                    ly, back_k = maps.features(k[:, :, rows], lambda y: far.keys(y.to(inputs.dtype), inputs.root))
                    g, u = (inputs.value(z[:, :, rows]) for z in (gradient, v))
                    shift = torch.mul(g, out[:, :, rows], out=fresh(g.shape, g)).sum(-1, keepdim=True)
                    tiles = _Tiles.of(tiling, rows, lx, ly, u)
                    log = tiling.queries(log_d[:, :, rows], value=torch.inf)
                    places = (_empty(z) for z in (tiles.q, tiles.k, tiles.v))
                    found = _Gradients(tiles, tiling.queries(g), tiling.queries(shift), log, *places)
                    found.within()
                    d_outer, d_total = found.beyond(state, d_outer, d_total)
                    dq.put(back_q(queries_from_tiles(found.d_q, q.shape[1], length)), rows)
                    dk.put(back_k(found.d_k.flatten(2, 3)[:, :, :length]), rows)
                    dv.put(found.d_v.flatten(2, 3)[:, :, :length], rows)
        d_inputs = (None if d.empty else d.joined() for d in (dq, dk, dv))
        return None, None, *d_inputs, None, d_outer, d_total, *maps.of_held()


def _empty(like: Tensor) -> Tensor:
    found = fresh(like.shape, like)
    return like.new_empty(like.shape) if found is None else found


class _Gradients(NamedTuple):
    """Tiles, the gradient g of out, gᵀout and log d; and where to put the gradients of log-features and values."""

    tiles: _Tiles
    g: Tensor
    shift: Tensor
    log_d: Tensor
    d_q: Tensor
    d_k: Tensor
    d_v: Tensor

    def within(self) -> None:
        """Pairs within tiles."""
        q, k, v, allowed = self.tiles[:4]
        with scratch(q):
            q_scale, k_scale = q.amax(-1, keepdim=True), k.amax(-1, keepdim=True)
            shape = (*v.shape[:3], *allowed.shape[3:])
            pair_scale = torch.add(k_scale.transpose(-1, -2), allowed.to(v.dtype).log(), out=fresh(shape, v))
            pair_scale = repeat_rows(pair_scale, self.tiles.groups)
            offsets = exp_less(pair_scale, self.log_d - q_scale, reuse=True)
            phi, psi = exp_less(q, q_scale), exp_less(k, k_scale)
            pairs = product(phi, psi.transpose(-1, -2)).mul_(offsets)
            product(pairs.transpose(-1, -2), self.g, out=self.d_v)
            pairs = product(self.g, v.transpose(-1, -2), out=pairs).sub_(self.shift).mul_(offsets)
            product(pairs, psi, out=self.d_q).mul_(phi)
            product(pairs.transpose(-1, -2), phi, out=self.d_k).mul_(psi)

    def beyond(self, state: State, d_outer: Tensor, d_total: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and the states before their tiles, keys and the states after theirs. Takes the gradient of the state
        after all tiles, gives that of the `state` before them.
        """
        q, _, v, _, entering, ended, mine = self.tiles
        scales, joined, decay = running_scales(Features(entering), state.log_scale, ended)
        decay = decay.transpose(-1, -2)
        psi = exp_less(entering, joined, reuse=True)  # the last use of the keys
        outer, total = product(psi.transpose(-1, -2), v), psi.sum(-2).unsqueeze(-1)
        outer, _ = decayed_sums(outer, decay, state.outer, False)
        total, _ = decayed_sums(total, decay, state.total, False)
        read = Features(q).raised(scales, reuse=True)
        read = read if mine is None else read.only(repeat_rows(mine, self.tiles.groups))
        phi = read.divided(self.log_d, reuse=True)
        d_phi = product(self.g, outer.transpose(-1, -2)).addcmul_(self.shift, total.transpose(-1, -2), value=-1)
        self.d_q.addcmul_(d_phi, phi)

        outer, total = product(phi.transpose(-1, -2), self.g), phi.mul_(self.shift).sum(-2).neg_().unsqueeze(-1)
        outer, d_outer = decayed_sums(outer, decay, d_outer, True)
        total, d_total = decayed_sums(total, decay, d_total, True)
        product(psi, outer, self.d_v)
        d_psi = product(v, outer.transpose(-1, -2), out=d_phi if self.tiles.groups == 1 else None)
        self.d_k.addcmul_(d_psi.add_(total.transpose(-1, -2)), psi)
        return d_outer, d_total
