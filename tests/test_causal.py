"""Causal attention with positive features, whose backward is written by hand: outputs and gradients are those of the
definition, in logarithms and in float64.
"""

import pytest
import torch
from test_mechanisms import D, build, draw_qkv
from variants import over

from hf_rfattn.ops import Inputs, State, attend_in_blocks, attend_to_past, blocks, normalise
from hf_rfattn.ops.naive import allowed_pairs, repeat_heads

positive_variants = over(
    [
        ("average", {}),
        ("favor+", {"num_features": 12}),
        ("favor+", {"trainable": True, "antithetic": True}),
        ("hedgehog", {}),
        ("linear", {}),
    ]
)

MASKS = {
    "plain": lambda length: {},
    "right": lambda length: {"key_mask": torch.arange(length) < torch.tensor([[length], [length * 2 // 3]])},
    "left": lambda length: {"key_mask": torch.arange(length) >= torch.tensor([[0], [length // 3]])},
    "packed": lambda length: {"segments": (torch.rand(2, length) > 0.97).long().cumsum(1)},
    "both": lambda length: {
        "key_mask": torch.rand(2, length) > 0.4,
        "segments": (torch.rand(2, length) > 0.9).long().cumsum(1),
    },
}


@pytest.fixture(params=[None, 1], ids=["one-block", "many-blocks"])
def any_blocks(request, monkeypatch):
    """Blocks as they are, or as short as they can be."""
    if request.param:
        monkeypatch.setitem(blocks.BLOCK, "cpu", request.param)


def in_logarithms(mechanism, q, k, v, **masks):
    """The definition for features of any size: softmax over keys of log φ(x)ᵀφ(y)."""
    root = D**-0.25
    x, y = mechanism.feature_map(q, "query", root).log, mechanism.feature_map(k, "key", root).log
    y = repeat_heads(y, q.shape[1])
    allowed = allowed_pairs(q.shape[2], k.shape[2], causal=True, **masks)
    scores = torch.logsumexp(x.unsqueeze(3) + y.unsqueeze(2), -1)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0) @ repeat_heads(v, q.shape[1])


def with_gradients(function, leaves, cotangent):
    out = function()
    return [out, *torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)]


def assert_equals_the_definition(mechanism, q, k, v, **masks):
    leaves = [x.requires_grad_() for x in (q, k, v)] + list(mechanism.parameters())
    cotangent = torch.randn_like(q)
    fast = with_gradients(lambda: mechanism(q, k, v, causal=True, **masks), leaves, cotangent)
    exact = with_gradients(lambda: in_logarithms(mechanism, q, k, v, **masks), leaves, cotangent)
    for a, b in zip(fast, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@positive_variants
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 257])
def test_equals_its_definition(any_blocks, variant, length, masks):
    mechanism = build(variant, kv_heads=2)
    assert_equals_the_definition(mechanism, *draw_qkv(length, kv_heads=2), **MASKS[masks](length))


@pytest.mark.parametrize("masks", MASKS)
def test_equals_its_definition_at_length_1025(masks):
    mechanism = build(("favor+", {"num_features": 12}), heads=2, kv_heads=1)
    assert_equals_the_definition(mechanism, *draw_qkv(1025, heads=2, kv_heads=1), **MASKS[masks](1025))


@positive_variants
@pytest.mark.parametrize("size", [20.0, 50.0])
def test_large_queries_and_keys(any_blocks, variant, size):
    """Exact in float64; finite in float32, where products of features of the first few tokens may underflow."""
    mechanism = build(variant)
    q, k, v = draw_qkv(150)
    q, k = size * q, size * k
    assert_equals_the_definition(mechanism, q.clone(), k.clone(), v.clone(), key_mask=torch.rand(2, 150) > 0.3)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    mechanism.float()
    for found in with_gradients(lambda: mechanism(*leaves, causal=True), leaves, torch.ones(2, 4, 150, D)):
        assert torch.isfinite(found).all()


@positive_variants
def test_bfloat16(any_blocks, variant):
    """Computed in float32: only inputs, outputs and gradients are rounded."""
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    half = [x.requires_grad_() for x in draw_qkv(200, kv_heads=2, dtype=torch.bfloat16)]
    full = [x.detach().float().requires_grad_() for x in half]
    cotangent = torch.randn(2, 4, 200, D).bfloat16()
    mask = torch.rand(2, 200) > 0.3
    found = with_gradients(lambda: mechanism(*half, causal=True, key_mask=mask), half, cotangent)
    exact = with_gradients(lambda: mechanism(*full, causal=True, key_mask=mask), full, cotangent.float())
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() <= 0.02 * b.norm()


@positive_variants
def test_gradients_go_through_the_state(any_blocks, variant):
    """Two calls with the state between them equal one; and both equal autograd through attention in blocks."""
    mechanism = build(variant, kv_heads=2)
    leaves = [x.requires_grad_() for x in draw_qkv(230, kv_heads=2)]
    q, k, v = leaves
    leaves += mechanism.parameters()
    far, held, mask = mechanism.far_field(), mechanism.held(), torch.rand(2, 230) > 0.2

    def run(attend, bounds):
        state, outs = None, []
        for start, stop in bounds:
            part = [x[:, :, start:stop] for x in (q, k, v)]
            out, state = attend(Inputs(*part, key_mask=mask[:, start:stop], causal=True), state)
            outs.append(out)
        return torch.cat([*(x.flatten() for x in outs), state.outer.flatten(), state.total.flatten()])

    def by_hand(inputs, state):
        return attend_to_past(inputs, far, state, held)

    def by_autograd(inputs, state):
        states = None if state is None else [State(*state)]
        out, (state,) = attend_in_blocks(inputs, lambda p, _: normalise(p[0]), far=[far], states=states, held=held)
        return out, state

    bounds = [(0, 100), (100, 101), (101, 230)]
    cotangent = torch.randn_like(run(by_hand, bounds))
    found = with_gradients(lambda: run(by_hand, bounds), leaves, cotangent)
    for a, b in zip(found, with_gradients(lambda: run(by_autograd, bounds), leaves, cotangent), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_some_inputs_alone():
    """Any of them may be frozen, and gradients may come in any layout."""
    mechanism = build(("hedgehog", {}), kv_heads=2)
    inputs = draw_qkv(100, kv_heads=2)
    cotangent = torch.randn(100, 4, 2, D, dtype=torch.float64).transpose(0, 2)
    leaves = [x.requires_grad_() for x in inputs] + list(mechanism.parameters())
    every = torch.autograd.grad(mechanism(*inputs, causal=True), leaves, cotangent)
    for leaf in leaves:
        leaf.requires_grad_(False)
    for leaf, expected in zip(leaves, every, strict=True):
        leaf.requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(mechanism(*inputs, causal=True), leaf, cotangent)[0], expected)
        leaf.requires_grad_(False)
