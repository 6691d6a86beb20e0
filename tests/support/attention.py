"""Mechanisms on q, k, v alone: random inputs, the dense definition, and the comparison with it."""

import torch

from hf_rfattn import build_mechanism
from hf_rfattn.ops.naive import repeat_heads

D = 8


def build(variant, heads=4, kv_heads=None, head_dim=D, dtype=torch.float64, **kwargs):
    name, options = variant
    return build_mechanism(name, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **options, **kwargs).to(
        dtype
    )


def draw_qkv(length, batch=2, heads=4, kv_heads=None, dtype=torch.float64, k_length=None, size=1.0):
    kv_heads = kv_heads or heads
    q = torch.randn(batch, heads, length, D, dtype=dtype) * size
    k, v = (torch.randn(batch, kv_heads, k_length or length, D, dtype=dtype) * size for _ in range(2))
    return q, k, v


def definition(mechanism, q, k, v, **masks):
    """Dense weights times values: what every fast path must equal."""
    return mechanism.attention_weights(q, k, **masks) @ repeat_heads(v, q.shape[1])


def assert_same_with_gradients(mechanism, q, k, v, tolerance, **masks):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    leaves = inputs + list(mechanism.parameters())
    fast, naive = mechanism(*inputs, **masks), definition(mechanism, *inputs, **masks)
    torch.testing.assert_close(fast, naive, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(naive)
    fast_grads = torch.autograd.grad(fast, leaves, cotangent, allow_unused=True)
    naive_grads = torch.autograd.grad(naive, leaves, cotangent, allow_unused=True)
    for a, b, leaf in zip(fast_grads, naive_grads, leaves, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=tolerance, atol=tolerance)


def tolerance_of(variant):
    """tanh features have denominators near zero, which magnify rounding."""
    return 1e-6 if "tanh" in str(variant) else 1e-8
