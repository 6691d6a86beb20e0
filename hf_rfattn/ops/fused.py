"""Operators on fused GPU kernels: PyTorch's FlexAttention, and gated linear attention of flash-linear-attention.

Linear attention with positive features is softmax attention twice (`ops.linear`), so FlexAttention computes both linear
attention and bands: one kernel in forward, two in backward, and no features or scores in memory. It is compiled once
per combination of dtype, head size and kind of mask, not per length. In half precision it multiplies in that precision
and accumulates in float32, as softmax kernels do.

Causal linear attention is a recurrence of sums on the scale of the largest log-feature m_t so far,

    S_t = exp(m_{t-1} - m_t) S_{t-1} + exp(log φ(y_t) - m_t) v_tᵀ,

which is gated linear attention (`fla.ops.gla`) with the change of a running maximum as its gate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .masks import segment_starts
from .softmax import exp_of_difference, merge
from .tiles import traced

BLOCK = 128  # block size of FlexAttention, which computes or skips whole blocks
COMPILER = "inductor"
SIGNATURES = 256  # recompile limit of FlexAttention; beyond it (torch's default is 8) it would run unfused
NO_MASS = -3e4  # log-mass if there are no keys, finite in half precision
RESET = -100.0  # log of a closed gate


class Landmarks(NamedTuple):
    """Log-linear features: log φ_r(x) = scale · weight_rᵀx + bias_r + offset(x)."""

    weight: Tensor  # [heads, M, D]
    bias: Tensor | None  # [heads, 1, M]
    offset: Tensor | float | None  # [B, H, L, 1]; None: such that Σ_r φ_r(x) = 1


def linear_attention(q, k, v, phi_q, phi_k, key_mask: Tensor | None) -> Tensor:
    """`ops.linear_attention` of features with `landmarks`."""
    parts = []
    for x, y in zip(phi_q.landmarks(q), phi_k.landmarks(k), strict=True):
        mean, mass = _landmarks_read(k, v, y, phi_k.scale, key_mask)
        parts.append(_read_landmarks(q, x, mean, mass, phi_q.scale))
    return merge(*parts)[0].to(q.dtype)


def _landmarks_read(k, v, features: Landmarks, scale: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean value μ `[B, Hkv, M, Dv]` and log-mass λ `[B, Hkv, M, 1]` of each feature."""
    offset = _offset(k, features, scale)
    weight = _landmark_tokens(features, k)
    mean, mass = attend(weight, k, v, scale=scale, key_bias=offset[..., 0], key_mask=key_mask)
    mass = mass if features.bias is None else mass + features.bias.to(mass).mT
    return mean, mass.clamp(min=NO_MASS)


def _read_landmarks(q, features: Landmarks, mean: Tensor, mass: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries to landmarks, and its log-sum-exp."""
    if len(features.weight) != mean.shape[1]:  # each query head has its own landmarks
        mean, mass = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (mean, mass))
    bias = mass if features.bias is None else mass + features.bias.to(mass).mT
    out, lse = attend(q, _landmark_tokens(features, q), mean, scale=scale, key_bias=bias[..., 0])
    return out.to(lse.dtype), lse + (_offset(q, features, scale) if features.offset is None else features.offset)


def _landmark_tokens(features: Landmarks, x: Tensor) -> Tensor:
    return features.weight.to(x.dtype).expand(x.shape[0], -1, -1, -1)


def _offset(x: Tensor, features: Landmarks, scale: float) -> Tensor:
    """The offset of log-features, `[B, H, L, 1]`."""
    if isinstance(features.offset, Tensor):
        return features.offset
    weight, dtype = _landmark_tokens(features, x), torch.promote_types(x.dtype, torch.float32)
    bias = None if features.bias is None else features.bias[:, 0].to(dtype).expand(len(x), -1, -1)
    return -attend(x, weight, weight, scale=scale, key_bias=bias)[1]


def banded_attention(
    q, k, v, bandwidth: int, scale: float, key_mask: Tensor | None, causal: bool, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`ops.banded_attention`: each query sees a range of keys."""
    keys = k.shape[2]
    at = torch.arange(keys - q.shape[2], keys, device=q.device, dtype=torch.int32)[None]
    low, high = at - bandwidth, at if causal else at + bandwidth
    if segments is not None:
        first, last = _ends(segments)
        low, high = torch.maximum(low, first), torch.minimum(high, last)
    first = _in_blocks(low, 1, keys).amin(2, keepdim=True)
    last = _in_blocks(high, 1, -1).amax(2, keepdim=True)
    start = torch.arange(0, keys, BLOCK, device=q.device)
    some = ((first < start + BLOCK) & (last >= start)).unsqueeze(1)
    low, high = (x.expand(len(q), -1) for x in (low, high))

    def visible(b, h, i, j):
        return (low[b, i] <= j) & (j <= high[b, i])

    mask = block_mask(some, q.shape[2], keys, visible)
    return attend(q, k, v, scale=scale, key_mask=key_mask, mask=mask)


def _ends(segments: Tensor) -> tuple[Tensor, Tensor]:
    """First and last position of the segment of each token, `[B, L]`."""
    at = torch.arange(segments.shape[1], device=segments.device, dtype=torch.int32).expand_as(segments)
    first = at.masked_fill(~segment_starts(segments), 0).cummax(1).values
    backwards = segment_starts(segments.flip(1))
    last = len(segments[0]) - 1 - at.masked_fill(~backwards, 0).cummax(1).values.flip(1)
    return first, last


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    tile_bias: Tensor | None = None,
    mask: Any = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention `[B, H, Lq, Dv]` and its log-sum-exp `[B, H, Lq, 1]` by FlexAttention.

    Queries `[B, H, Lq, D]`, keys and values `[B, Hkv, Lk, D]`; `key_bias` `[B, Hkv, Lk]` is added to scores and may
    need gradients; `key_mask` `[B, Lk]`: True for keys that are not padding; `tile_bias` `[B, H, T, Lk]`: in place of
    these two, a bias of keys per tile of queries; `mask`: a `block_mask`. A query that sees no key has out = 0 and
    lse = -inf.
    """
    H, groups = q.shape[1], q.shape[1] // k.shape[1]
    bias = score_mod = None
    if key_bias is not None and key_bias.requires_grad and torch.is_grad_enabled():
        q, k = _with_bias_columns(q, k, key_bias / scale)
    elif key_bias is not None:
        bias = key_bias.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2)
    if key_mask is not None:
        hidden = torch.zeros_like(key_mask, dtype=torch.float32).masked_fill(~key_mask, -torch.inf)[:, None]
        bias = hidden.expand(-1, H, -1) if bias is None else bias + hidden
    if bias is not None:

        def score_mod(score, b, h, i, j):
            return score + bias[b, h, j]

    elif tile_bias is not None:
        size = q.shape[2] // tile_bias.shape[2]

        def score_mod(score, b, h, i, j):
            return score + tile_bias[b, h, i // size, j]

    out, lse = _flex(q, k, v, score_mod, mask, scale, groups > 1)
    return out, lse.unsqueeze(-1)


def _with_bias_columns(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Extend queries and keys so that their products include the bias, whose gradient then needs matrix products only.

    The bias is split into two columns, so that its precision in half precision is that of the float32 accumulation.
    """
    high = bias.to(k.dtype)
    columns = torch.stack([high, (bias - high).to(k.dtype)], dim=-1)
    return F.pad(q, (0, 2), value=1.0), torch.cat([k, columns], dim=-1)


def block_mask(some: Tensor, queries: int, keys: int, visible: Callable[..., Tensor]) -> Any:
    """Build the mask of `attend` from `some`, `[B or 1, H or 1, query blocks, key blocks]`, True for blocks in which
    some query sees some key, and `visible(b, h, i, j)`, which says whether query i sees key j.
    """
    from torch.nn.attention.flex_attention import BlockMask

    order = some.int().argsort(dim=-1, descending=True, stable=True).int()
    count = some.sum(-1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(queries, keys))


def block_mask_of_pairs(pairs: Tensor, size: int, visible: Callable[..., Tensor]) -> Any:
    """`block_mask` from `pairs` `[B, H, Lq, Lk / size]`, True where a query sees some key of a group of `size` keys."""
    queries, keys = pairs.shape[2], pairs.shape[3] * size
    some = _in_blocks(pairs, 2, False).any(3).repeat_interleave(size, dim=3)
    return block_mask(_in_blocks(some, 3, False).any(4), queries, keys, visible)


def _in_blocks(x: Tensor, dim: int, value: float) -> Tensor:
    """Split a dimension into blocks, padded with a value."""
    fill = [0, 0] * (x.ndim - 1 - dim) + [0, -x.shape[dim] % BLOCK]
    return F.pad(x, fill, value=value).unflatten(dim, (-1, BLOCK))


def _flex(*arguments: Any) -> tuple[Tensor, Tensor]:
    """FlexAttention, compiled at the first call, or as part of a model that is being compiled."""
    global _compiled
    if traced():
        return _flex_attention(*arguments)
    if _compiled is None:
        options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "recompile_limit": SIGNATURES}
        _compiled = torch.compile(_flex_attention, backend=COMPILER, **options)
    return _compiled(*arguments)


_compiled: Any = None


def _flex_attention(q, k, v, score_mod, block_mask, scale: float, grouped: bool) -> tuple[Tensor, Any]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


def causal_linear_attention(q, k, v, phi_q, phi_k, key_mask, segments, sums) -> tuple[Tensor, ...]:
    """`ops.causal_linear_attention` of positive features, with sums as (log_scale, outer, total)."""
    log_scale, outer, total = sums
    dtype, groups = outer.dtype, q.shape[1] // k.shape[1]
    log = phi_k(k.to(dtype)).log  # [B, Hkv, L, M]
    if key_mask is not None:
        log = log.masked_fill(~key_mask[:, None, :, None], -torch.inf)
    starts = None
    if segments is not None:
        starts = segment_starts(segments[1])
        starts[:, 0] = False  # the sums belong to the first segment
    largest = _running_maximum(torch.cat([log_scale.detach(), log.detach()], dim=2), starts)
    before, largest = largest[:, :, :-1], largest[:, :, 1:]
    gate = (before - largest).masked_fill(before == -torch.inf, 0.0)  # the sums are still empty
    if starts is not None:
        gate = gate.masked_fill(starts[:, None, :, None], RESET)
    keys = exp_of_difference(log, largest)
    read = phi_q(q.to(dtype)).log + largest.repeat_interleave(groups, 1)
    if segments is not None:
        read = read.masked_fill((segments[0] != segments[1])[:, None, :, None], -torch.inf)
    scale = read.detach().amax(-1, keepdim=True)
    values = F.pad(v.to(dtype), (0, 1), value=1.0)  # the last column accumulates the weights
    state = torch.cat([outer, total], dim=-1)
    repeated = (x.repeat_interleave(groups, 1) for x in (keys, values, gate, state))
    found, state = _gated_linear_attention(exp_of_difference(read, scale), *repeated)
    d = found[..., -1:]
    none = d == 0
    out = found[..., :-1] / d.masked_fill(none, 1.0)
    log_d = scale + d.masked_fill(none, 1.0).log()
    after = state[:, ::groups]
    return out.to(q.dtype), log_d, largest[:, :, -1:].clone(), after[..., :-1], after[..., -1:]


def _running_maximum(log: Tensor, starts: Tensor | None) -> Tensor:
    """Running maximum along dimension 2 of `[B, H, 1 + L, M]`, restarted where a segment starts, `[B, L]`."""
    if starts is None:
        return log.cummax(2).values
    bits = log.float().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the same order as the floats
    number = F.pad(starts.long().cumsum(1), (1, 0))[:, None, :, None] << 32
    bits = ((bits + number).cummax(2).values - number).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32).to(log.dtype)


def _gated_linear_attention(q, k, v, gate, state) -> tuple[Tensor, Tensor]:
    """o_t = q_tᵀ S_t with S_t = exp(gate_t) S_{t-1} + k_t v_tᵀ: o `[B, H, L, Dv]` and the last S `[B, H, M, Dv]`."""
    from fla.ops.gla import chunk_gla

    q, k, v, gate = (x.transpose(1, 2).contiguous() for x in (q, k, v, gate))
    out, state = chunk_gla(q, k, v, gate, scale=1.0, initial_state=state, output_final_state=True)
    return out.transpose(1, 2), state
