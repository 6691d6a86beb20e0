"""Linear attention where every query sees every visible key, with positive features: two softmaxes in a row.

With log-features l, the mass z_r = Σ_j exp l_r(y_j) of each feature and the mean of the values that it sees, μ_r = Σ_j
exp l_r(y_j) v_j / z_r,

    φ(x_i)ᵀ S / φ(x_i)ᵀ z = Σ_r softmax_r(l_r(x_i) + log z_r) μ_r,

so that no denominator is left, and nothing can overflow. Backward computes both softmaxes again, a block at a time,
from log z and μ alone. Of bfloat16 inputs, values are multiplied in bfloat16; all else, and all gradients, are float32.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .blocks import FarField, Rows, block_length, key_blocks, keys_shown, product_dtype, slices, summarise
from .gradients import FeatureGradients
from .inputs import Inputs
from .partial import exp_less, finite
from .recompute import recompute
from .scratch import fresh, may_overwrite, product, scratch


def attend_to_all(inputs: Inputs, far: FarField, held: Sequence[Tensor] = ()) -> Tensor:
    """Attention `[B, H, Lq, D]`; `held` are all parameters and buffers that the features read."""
    tensors = (inputs.q, inputs.k, inputs.v, *held)
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _attend(inputs, far, held)[0]
    return _AttendToAll.apply(inputs[3:], far, *tensors)


def _attend(inputs: Inputs, far: FarField, held: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """The output, log z `[B, Hkv, 1, M]` and μ `[B, Hkv, M, D]`."""
    state = summarise(inputs, far, held)
    log_mass = finite(state.log_scale + state.total.log().transpose(-1, -2))
    mean = state.outer / state.total.clamp(min=torch.finfo(state.total.dtype).tiny)
    outs = Rows(inputs.q.shape[:3], mean.shape[-1], inputs.q)
    narrow = product_dtype(inputs.q.dtype, inputs.dtype)
    for rows in _query_blocks(inputs, far):
        x = inputs.q[:, :, rows]

        def read(x: Tensor, log_mass: Tensor, mean: Tensor, rows: slice = rows) -> tuple[Tensor]:
            weights = _weights(far.queries(x.to(inputs.dtype), inputs.root).log, log_mass)
            place = outs.place(rows, narrow) if x.shape[1] == mean.shape[1] else None
            return (product(weights.to(narrow), mean.to(narrow), out=place).reshape(*x.shape[:3], -1).to(x.dtype),)

        with scratch(x):
            outs.put(recompute(read, x, log_mass, mean, held=held)[0], rows)
    return outs.joined(), log_mass, mean


def _query_blocks(inputs: Inputs, far: FarField) -> list[slice]:
    B, H, L, D = inputs.q.shape
    return slices(L, block_length(L, B * H * max(D, far.num_features), 1, 1, inputs.q.device))


def _weights(logs: Tensor, log_mass: Tensor) -> Tensor:
    """softmax_r(l_r(x) + log z_r), query heads that share a key head below each other: `[B, Hkv, G·L, M]`."""
    logs = _grouped(logs, log_mass.shape[1])
    if not may_overwrite():
        return (logs + log_mass).softmax(-1)
    return torch.softmax(logs.add_(log_mass), -1, out=logs)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


class _AttendToAll(torch.autograd.Function):
    """The gradients of both softmaxes by hand, those of the features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, known: tuple, far: FarField, q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        out, log_mass, mean = _attend(Inputs(q, k, v, *known), far)
        ctx.known, ctx.far = known, far
        ctx.save_for_backward(q, k, v, out, log_mass, mean, *held)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, log_mass, mean, *held = ctx.saved_tensors
        inputs, far, kv_heads = Inputs(q, k, v, *ctx.known), ctx.far, k.shape[1]
        maps = FeatureGradients(held, ctx.needs_input_grad[5:])
        dq, dk, dv = (Rows(x.shape[:3], x.shape[3], x) for x in (q, k, v))
        d_mean, d_mass = torch.zeros_like(mean), torch.zeros_like(log_mass)

        with torch.autocast(q.device.type, enabled=False):
            for rows in _query_blocks(inputs, far):
                with scratch(q):
                    logs, back = maps.features(q[:, :, rows], lambda x: far.queries(x.to(inputs.dtype), inputs.root))
                    weights = _weights(logs, log_mass)  # in place of the log-features
                    g, o = (_grouped(z[:, :, rows].to(inputs.dtype), kv_heads) for z in (gradient, out))
                    shift = torch.mul(g, o, out=fresh(g.shape, g)).sum(-1, keepdim=True)
                    d_logs = product(g, mean.transpose(-1, -2)).sub_(shift).mul_(weights)
                    d_mean += product(weights.transpose(-1, -2), g)
                    d_mass += d_logs.sum(-2, keepdim=True)
                    dq.put(back(d_logs), rows)
            shift = (d_mean * mean).sum(-1).unsqueeze(-2) - d_mass
            for rows in key_blocks(inputs, far):
                with scratch(k):
                    logs, back = maps.features(k[:, :, rows], partial(keys_shown, inputs, far, rows))
                    weights = exp_less(logs, log_mass)
                    d_logs = product(inputs.value(v[:, :, rows]), d_mean.transpose(-1, -2)).sub_(shift).mul_(weights)
                    dv.put(product(weights, d_mean, out=dv.place(rows, d_mean.dtype)), rows)
                    dk.put(back(d_logs), rows)
        return None, None, *(None if d.empty else d.joined() for d in (dq, dk, dv)), *maps.of_held()
