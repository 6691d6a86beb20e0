"""Exact softmax attention that also returns its log-sum-exp, so that parts can be computed separately and merged."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .naive import allowed_pairs
from .tiles import traced


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """out_i = Σ_j P_ij v_j with P_ij = exp(scale · q_iᵀk_j + bias_ij - lse_i), and lse `[B, H, Lq, 1]`.

    Queries `[B, H, Lq, D]`, keys and values `[B, Hkv, Lk, D]`; `bias` broadcasts to `[B, H, Lq, Lk]` and is -inf where
    a query does not see a key. A query that sees no key has out = 0 and lse = -inf. O(Lq · Lk · D), so meant for few
    queries or keys.
    """
    B, H, L = q.shape[:3]
    if k.shape[1] != H:
        k, v = k.repeat_interleave(H // k.shape[1], dim=1), v.repeat_interleave(H // v.shape[1], dim=1)
    # torch's CPU kernel returns the log-sum-exp, but without a gradient, and fails on empty tensors.
    fused = q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and min(q.numel(), k.numel()) > 0
    if fused and not torch.is_grad_enabled() and not traced():
        mask = None if bias is None else bias.to(q.dtype).expand(B, H, L, k.shape[2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        lse = lse.unsqueeze(-1)
        if bias is not None:  # the kernel returns 0 where no key is seen
            lse = lse.masked_fill((bias == -torch.inf).all(-1, keepdim=True), -torch.inf)
        return out, lse
    scores = q @ (scale * k).mT
    return softmax_of_scores(scores if bias is None else scores + bias, v)


def softmax_of_scores(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` from scores `[..., Lq, Lk]`, which are -inf where a query does not see a key."""
    largest = scores.detach().amax(-1, keepdim=True)
    weights = exp_of_difference(scores, largest)
    total = weights.sum(-1, keepdim=True).clamp(min=SOME)
    return (weights @ v) / total, largest + total.log()


def merge(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """out = Σ_p exp(lse_p - lse) out_p with lse = log Σ_p exp lse_p: attention over the keys of several disjoint parts,
    from out `[B, H, L, Dv]` and lse `[B, H, L, 1]` of each. O(L · Dv) per part.

    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> out, lse = merge(attend(q, k[:, :, :3], v[:, :, :3]), attend(q, k[:, :, 3:], v[:, :, 3:]))
    >>> torch.allclose(out, attend(q, k, v)[0], atol=1e-6)
    True
    """
    if len(parts) == 1:
        return parts[0]
    largest = parts[0][1].detach()
    for _, lse in parts[1:]:
        largest = torch.maximum(largest, lse.detach())
    total, out = torch.zeros_like(largest), torch.zeros_like(parts[0][0])
    for part, lse in parts:
        weight = exp_of_difference(lse, largest)
        total, out = total + weight, torch.addcmul(out, part, weight)
    total = total.clamp(min=SOME)
    return out / total, largest + total.log()


SOME = 2.0**-20  # lower bound of a sum of weights whose maximum is 1; makes division by an empty sum safe
_LEAST = -8e37  # replaces an offset of -inf, since it can be scaled and subtracted from -inf
LOG2_E = math.log2(math.e)


def exp_of_difference(log: Tensor, offset: Tensor) -> Tensor:
    """exp(log - offset) as a new tensor, zero where log is -inf.

    Uses exp2, since torch's exp has half its speed on a CPU, and a fortieth where results underflow, which is common in
    real heads.
    """
    return torch.add(offset.clamp(min=_LEAST) * -LOG2_E, log, alpha=LOG2_E).exp2_()


def exp2_of_difference_(log2: Tensor, offset: Tensor) -> Tensor:
    """2 to the power of log2 - offset, in place, zero where log2 is -inf."""
    return log2.sub_(offset.clamp(min=_LEAST)).exp2_()


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Exact softmax attention `[B, H, L, D]` with the masks of mechanisms, by torch's fused kernel. This is the
    reference for all errors and speed-ups. Rows without visible keys are zero.
    """
    mask = None
    if key_mask is not None and not causal and segments is None:
        mask = key_mask[:, None, None, :]
    elif key_mask is not None or segments is not None or (causal and q.shape[2] != k.shape[2]):
        mask = allowed_pairs(q.shape[2], k.shape[2], key_mask, causal, segments, device=q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
