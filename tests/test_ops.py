"""Operators: however a sequence is cut into blocks and tiles, outputs and gradients are those of the definition."""

import copy

import pytest
import torch
from support.attention import D, assert_same_with_gradients, build, definition, draw_qkv, tolerance_of
from support.variants import every_mechanism, every_variant, over
from torch import nn

from hf_rfattn import build_mechanism, redraw
from hf_rfattn.ops import attend, banded, merge, softmax_attention, tiles
from hf_rfattn.ops import causal as causal_ops
from hf_rfattn.ops.autograd import recompute
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


def cut(monkeypatch, block, tile):
    """Blocks of at most so many numbers, tiles of so many positions."""
    monkeypatch.setitem(tiles.BLOCK, "cpu", block)
    monkeypatch.setattr(causal_ops, "TILE", tile)
    monkeypatch.setattr(banded, "TILES", (tile,))


@pytest.fixture(params=[(1, 1), (1, 3), (150, 7), (2**19, 5), (1, 64)], ids=str)
def any_sizes(request, monkeypatch):
    cut(monkeypatch, *request.param)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_sizes_change_nothing(any_sizes, variant, causal):
    mechanism, tolerance = build(variant, heads=2, kv_heads=1), tolerance_of(variant)
    q, k, v = draw_qkv(65, heads=2, kv_heads=1)
    key_mask, segments = torch.rand(2, 65) > 0.4, (torch.rand(2, 65) > 0.9).long().cumsum(1)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal, key_mask=key_mask, segments=segments)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_tiles_of_traced_code(monkeypatch, packed):
    """Seven tiles, on scales of their own. The lengths of compiled tests have one or two, which need no rescaling."""
    monkeypatch.setattr(causal_ops, "traced", lambda: True)
    monkeypatch.setattr(causal_ops, "TRACED_TILE", 16)
    mechanism, (q, k, v) = build(("favor+", {}), kv_heads=2), draw_qkv(100, kv_heads=2, size=2.0)
    masks = {"causal": True, "key_mask": torch.rand(2, 100) > 0.4}
    if packed:
        masks["segments"] = (torch.rand(2, 100) > 0.95).long().cumsum(1)
    torch.testing.assert_close(mechanism(q, k, v, **masks), definition(mechanism, q, k, v, **masks))


@every_variant
def test_sizes_change_nothing_in_generation(any_sizes, variant):
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(70, kv_heads=2)
    key_mask = torch.rand(2, 70) > 0.3
    whole = mechanism(q, k, v, key_mask=key_mask, causal=True)
    state = mechanism.new_state(2, D, q.dtype, q.device)
    parts = [slice(0, 33), slice(33, 34), slice(34, 70)]
    outs = [mechanism(*(x[:, :, p] for x in (q, k, v)), state=state, key_mask=key_mask[:, p]) for p in parts]
    torch.testing.assert_close(torch.cat(outs, dim=2).detach(), whole.detach())


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("bandwidth", [130, 160, 229, 230, 300])
@pytest.mark.parametrize(("name", "options"), [("band", {}), ("fmm", {}), ("fmm", {"normalizer": "separate"})])
def test_wide_bands(name, options, bandwidth, causal, gradients):
    """As many heads as bge-small has: blocks are then shorter than the band reaches."""
    mechanism = build_mechanism(name, num_heads=12, head_dim=32, bandwidth=bandwidth, **options)
    q = torch.randn(1, 12, 230, 32, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        out = mechanism(q, q, q, causal=causal)
        expected = definition(mechanism, q, q, q, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    if gradients:
        cotangent = torch.randn_like(out)
        found, exact = (torch.autograd.grad(o, q, cotangent)[0] for o in (out, expected))
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_many_heads_and_sequences(variant, causal):
    """A position brings so many numbers that a block is as short as it can be."""
    mechanism = build(variant, heads=64)
    q, k, v = draw_qkv(40, batch=48, heads=64)
    with torch.no_grad():
        out = mechanism(q, k, v, causal=causal)
        torch.testing.assert_close(out[:2], definition(mechanism, q[:2], k[:2], v[:2], causal=causal))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_grouped_heads_and_other_value_sizes(monkeypatch, causal):
    cut(monkeypatch, 1, 16)
    mechanism = build_mechanism(
        "fmm", num_heads=6, num_kv_heads=2, head_dim=8, bandwidth=5, normalizer="joint"
    ).double()
    q = torch.randn(2, 6, 140, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 140, d, dtype=torch.float64) for d in (8, 5))
    assert_same_with_gradients(mechanism, q, k, v, 1e-8, causal=causal)


@every_variant
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("state", [False, True], ids=["at-once", "generation"])
def test_no_sequences_and_no_tokens(variant, batch, length, state):
    mechanism = build(variant, kv_heads=2)
    q, k, v = (x.requires_grad_() for x in draw_qkv(length, batch=batch, kv_heads=2))
    for causal in (False, True):
        past = mechanism.new_state(batch, D, q.dtype, "cpu") if state else None
        out = mechanism(q, k, v, causal=causal, state=past, key_mask=torch.ones(batch, length, dtype=torch.bool))
        assert out.shape == q.shape
        out.sum().backward()


def test_packed_sequences_without_a_visible_key():
    mechanism = build(("band", {"bandwidth": 3, "global_tokens": 2}))
    q, k, v = draw_qkv(40)
    segments, hidden = (torch.arange(40) // 10)[None].expand(2, -1), torch.zeros(2, 40, dtype=torch.bool)
    for causal in (False, True):
        out = mechanism(q, k, v, key_mask=hidden, segments=segments, causal=causal)
        assert torch.equal(out, torch.zeros_like(out))


def test_packed_sequences_of_very_different_lengths():
    mechanism = build(("favor+", {}))
    q, k, v = draw_qkv(300)
    lengths = [1, 1, 5, 200, 2, 3, 88]
    segments = torch.repeat_interleave(torch.tensor([7, 3, 9, 1, 2, 0, 4]), torch.tensor(lengths))
    segments = torch.stack([segments, torch.zeros_like(segments)])
    assert_same_with_gradients(mechanism, q, k, v, 1e-8, segments=segments, key_mask=torch.rand(2, 300) > 0.3)


# Numbers of any size


def in_logarithms(mechanism, q, k, v, **masks):
    """The definition for features of any size: softmax over keys of log φ(x)ᵀφ(y)."""
    root = D**-0.25
    x = mechanism.feature_map("query", root).exactly(q).log
    y = repeat_heads(mechanism.feature_map("key", root).exactly(k).log, q.shape[1])
    allowed = allowed_pairs(q.shape[2], k.shape[2], causal=True, **masks)
    scores = torch.logsumexp(x.unsqueeze(3) + y.unsqueeze(2), -1)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~allowed, 0) @ repeat_heads(v, q.shape[1])


@positive_variants
@pytest.mark.parametrize("masks", ["plain", "padded", "packed"])
@pytest.mark.parametrize("size", [20.0, 50.0, 200.0])
def test_large_queries_and_keys(variant, size, masks):
    """Scores with a standard deviation up to 40,000: exact in float64, where tiles are computed key by key."""
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(150, kv_heads=2)
    q, k, v = (x.requires_grad_() for x in (size * q, size * k, v))
    given = {}
    if masks != "plain":
        given["key_mask"] = torch.rand(2, 150) > 0.3
    if masks == "packed":
        given["segments"] = (torch.rand(2, 150) > 0.97).long().cumsum(1)
    leaves, cotangent = [q, k, v, *mechanism.parameters()], torch.randn_like(q)
    outs = [mechanism(q, k, v, causal=True, **given), in_logarithms(mechanism, q, k, v, **given)]
    found, exact = (torch.autograd.grad(out, leaves, cotangent, materialize_grads=True) for out in outs)
    for a, b in zip([outs[0], *found], [outs[1], *exact], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@positive_variants
@pytest.mark.parametrize("deviation", [1.0, 100.0, 1e4, 1e6])
def test_cached_and_uncached_agree_in_float32(variant, deviation):
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = draw_qkv(150, dtype=torch.float32)
    q, k = (x * deviation**0.5 for x in (q, k))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = mechanism(q, k, v, causal=True)
    state = mechanism.new_state(2, D, torch.float32, "cpu")
    with torch.no_grad():
        steps = [mechanism(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state) for t in range(150)]
    exact = copy.deepcopy(mechanism).double()(*(x.detach().double() for x in leaves), causal=True).float()
    tolerance = {1e4: 1e-2, 1e6: 5e-2}.get(deviation, 1e-3)  # such logarithms have lost the digits that decide
    torch.testing.assert_close(torch.cat(steps, dim=2), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, exact, rtol=5e-2, atol=5e-2)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True))


@positive_variants
def test_bfloat16(variant):
    """Computed in float32: only inputs, outputs and gradients are rounded."""
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    half = [x.requires_grad_() for x in draw_qkv(200, kv_heads=2, dtype=torch.bfloat16)]
    full = [x.detach().float().requires_grad_() for x in half]
    cotangent, mask = torch.randn(2, 4, 200, D).bfloat16(), torch.rand(2, 200) > 0.3
    outs = [mechanism(*x, causal=True, key_mask=mask) for x in (half, full)]
    found = [outs[0], *torch.autograd.grad(outs[0], half, cotangent, materialize_grads=True)]
    exact = [outs[1], *torch.autograd.grad(outs[1], full, cotangent.float(), materialize_grads=True)]
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() <= 0.02 * b.norm()


# Gradients


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


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_gradients_reach_the_tensors_that_forward_used(variant, causal):
    """By `functional_call`, with backward outside of it; and in the replicas of `nn.DataParallel`, whose parameters are
    plain attributes.
    """
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(70, kv_heads=2)
    cotangent = torch.randn_like(q)
    names = [name for name, _ in mechanism.named_parameters()]
    others = {name: (p + 0.1).detach().requires_grad_() for name, p in mechanism.named_parameters()}
    called = torch.func.functional_call(mechanism, others, (q, k, v), {"causal": causal})
    moved = copy.deepcopy(mechanism)
    moved.load_state_dict(others, strict=False)
    if not names:
        return
    expected = torch.autograd.grad(moved(q, k, v, causal=causal), list(moved.parameters()), cotangent)
    found = torch.autograd.grad(called, list(others.values()), cotangent)
    replicated = torch.autograd.grad(
        _replica(moved, list(others.values()))(q, k, v, causal=causal), list(others.values()), cotangent
    )
    for a, b, c in zip(found, replicated, expected, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


def _replica(module, values):
    """What torch.nn.parallel.replicate makes, without a second device."""
    values = iter(values)

    def replicate(module):
        copied = module._replicate_for_data_parallel()
        for name in module._parameters:
            setattr(copied, name, next(values) * 1)
        for name, child in module._modules.items():
            copied._modules[name] = replicate(child)
        return copied

    return replicate(module)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_second_derivatives(variant, causal):
    mechanism = build(variant, heads=2, kv_heads=1)
    if variant[0] == "exact_heads":
        pytest.skip("torch's fused softmax has no second derivatives on CPUs")
    # short inputs of a mechanism that is then softmax go to torch's kernel, which has no second derivatives on CPUs
    length = mechanism.config.exact_keys + 5 if mechanism.holds_all_keys else 9
    inputs = [x.requires_grad_() for x in draw_qkv(length, 1, heads=2, kv_heads=1)]
    leaves = inputs + list(mechanism.parameters())
    key_mask = (torch.arange(length) != 4)[None]

    def penalty(function):
        out = function(*inputs, key_mask=key_mask, causal=causal)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves, materialize_grads=True)

    found = penalty(mechanism)
    exact = penalty(lambda *x, **masks: definition(mechanism, *x, **masks))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_variant
def test_transforms_of_torch_func(variant):
    mechanism = build(variant)
    q, k, v = draw_qkv(20, batch=3)

    def loss(q, k, v):
        return mechanism(q, k, v, causal=True).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected, strict=True):
        torch.testing.assert_close(a, b)
    each = torch.func.vmap(lambda *x: mechanism(*(z[None] for z in x))[0])(q, k, v)
    torch.testing.assert_close(each, mechanism(q, k, v))


def test_recompute_keeps_inputs_only():
    """Intermediate results are freed after forward and made again in backward."""
    alive, calls = [], []

    def function(x):
        calls.append(torch.is_grad_enabled())
        hidden = x.exp()
        alive.append(torch._C._WeakTensorRef(hidden))
        return (hidden.sin(),)

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (y,) = recompute(function, x)
    assert alive[0].expired() and calls == [False]
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, x.exp() * x.exp().cos())
    assert calls == [False, True]


def test_recompute_inside_autocast_is_still_exact():
    x = torch.randn(8, 8, requires_grad=True)
    weight = nn.Parameter(torch.randn(8, 8))
    y = recompute(lambda x, weight: x @ weight, x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.autograd.grad(y.sum(), (x, weight))
    for found, expected in zip(grads, torch.autograd.grad((x @ weight).sum(), (x, weight)), strict=True):
        assert torch.equal(found, expected)


def test_a_redraw_between_forward_and_backward_is_an_error():
    """Gradients of a projection that is no longer there would be wrong without a word."""
    mechanism = build_mechanism("favor+", num_heads=2, head_dim=8)
    q = torch.randn(1, 2, 10, 8, requires_grad=True)
    out = mechanism(q, q, q)
    redraw(mechanism)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# What is returned, and where


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_inputs_and_earlier_outputs_are_left_alone(variant, causal):
    """Neither inputs nor what hooks and callers keep is ever written over; nor does `torch.device` matter."""
    mechanism = build(variant, dtype=torch.float32)
    first, second = draw_qkv(200, dtype=torch.float32), draw_qkv(200, dtype=torch.float32)
    kept, inputs = [], [x.clone() for x in first]
    mechanism.register_forward_hook(lambda module, args, out: kept.append(out))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode(), torch.device("meta"):
            out = mechanism(*first, causal=causal)
            expected = out.clone()
            mechanism(*second, causal=causal)
        torch.testing.assert_close(kept[-2], expected, rtol=0, atol=0)
        torch.testing.assert_close(kept[-2], kept[0])
    assert all(torch.equal(a, b) for a, b in zip(first, inputs, strict=True))


@pytest.mark.parametrize("gradients", [False, True])
def test_attend_and_merge_are_softmax(gradients):
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    allowed = torch.rand(2, 1, 7, 9) > 0.3
    allowed[0, :, 3] = False
    bias = torch.zeros(2, 1, 7, 9).masked_fill(~allowed, -torch.inf)
    leaves = [x.requires_grad_(gradients) for x in (q, k, v)]
    parts = [slice(0, 4), slice(4, 9)]
    with torch.set_grad_enabled(gradients):
        out, lse = merge(*(attend(q, k[:, :, p], v[:, :, p], bias[..., p], 0.3) for p in parts))
        scores = q @ repeat_heads(k, 4).mT * 0.3 + bias
        weights = scores.softmax(-1).nan_to_num(0)
        torch.testing.assert_close(out, weights @ repeat_heads(v, 4))
        torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True))
    if gradients:
        masked = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0)
        seen = allowed.any(-1, keepdim=True)
        cotangent = torch.randn_like(out)
        found = torch.autograd.grad((out * cotangent).sum() + lse[seen.expand_as(lse)].sum(), leaves)
        exact = (masked @ repeat_heads(v, 4) * cotangent).sum()
        exact = exact + scores.masked_fill(~seen, 0).logsumexp(-1, keepdim=True)[seen.expand_as(lse)].sum()
        for a, b in zip(found, torch.autograd.grad(exact, leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_softmax_attention_has_the_masks_of_mechanisms():
    q, k, v = draw_qkv(20, dtype=torch.float64)
    segments = (torch.arange(20) // 7)[None].expand(2, -1)
    masks = {"key_mask": torch.rand(2, 20) > 0.3, "causal": True, "segments": segments}
    band = build_mechanism("band", num_heads=4, head_dim=D, bandwidth=20).double()
    torch.testing.assert_close(softmax_attention(q, k, v, **masks), definition(band, q, k, v, **masks))
