"""Attention in blocks: however a sequence is cut, outputs and gradients are those of the definition, and memory stays
linear.
"""

import subprocess
import sys
import threading

import pytest
import torch
from test_mechanisms import assert_same_with_gradients, build, draw_qkv, tolerance_of
from torch import nn
from variants import every_mechanism, every_variant

from hf_rfattn import build_mechanism, redraw
from hf_rfattn.ops import blocks, scratch
from hf_rfattn.ops.recompute import recompute


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks as short as they can be: one tile, or what a band needs."""
    monkeypatch.setitem(blocks.BLOCK, "cpu", 1)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [65, 150, 257])
def test_many_blocks_equal_the_definition(small_blocks, variant, length, causal):
    mechanism = build(variant, heads=2, kv_heads=1)
    q, k, v = draw_qkv(length, heads=2, kv_heads=1)
    tolerance = tolerance_of(variant)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal)
    key_mask = torch.rand(2, length) > 0.4
    segments = (torch.rand(2, length) > 0.97).long().cumsum(1)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal, key_mask=key_mask, segments=segments)


@every_variant
def test_extending_a_state_in_many_blocks(small_blocks, variant):
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(300, kv_heads=2)
    key_mask = torch.rand(2, 300) > 0.3
    whole = mechanism(q, k, v, key_mask=key_mask, causal=True)
    state = mechanism.new_state(2, v.shape[-1], q.dtype, q.device)
    outs = []
    for part in (slice(0, 170), slice(170, 171), slice(171, 300)):
        new = [x[:, :, part] for x in (q, k, v)]
        outs.append(mechanism.extend(*new, state, key_mask=key_mask[:, part], fresh=part.start == 0))
    torch.testing.assert_close(torch.cat(outs, dim=2).detach(), whole.detach())


@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_memory_of_the_thread_changes_nothing(small_blocks, variant, causal):
    """Without gradients blocks write over each other's memory; what was returned stays what it was."""
    mechanism = build(variant, dtype=torch.float32)
    first, second = draw_qkv(200, dtype=torch.float32), draw_qkv(200, dtype=torch.float32)
    expected = mechanism(*(x.requires_grad_() for x in first), causal=causal).detach()
    with torch.inference_mode():
        out = mechanism(*first, causal=causal)
        kept = out.clone()
        mechanism(*second, causal=causal)
        assert torch.equal(out, kept)
    with torch.no_grad():  # after inference mode, in another thread, and with no memory left
        torch.testing.assert_close(mechanism(*first, causal=causal), expected)
        results = []
        thread = threading.Thread(target=lambda: results.append(_without_gradients(mechanism, first, causal)))
        thread.start()
        thread.join()
        torch.testing.assert_close(results[0], expected)
        torch.testing.assert_close(out, expected)


@torch.no_grad()
def _without_gradients(mechanism, inputs, causal):
    return mechanism(*inputs, causal=causal)


def test_full_memory_is_replaced_by_new(monkeypatch):
    monkeypatch.setattr(scratch, "SIZE", 1000)
    monkeypatch.setattr(scratch, "_memory", scratch._Memory())
    mechanism = build(("favor+", {}), dtype=torch.float32)
    inputs = draw_qkv(200, dtype=torch.float32)
    expected = mechanism(*(x.double() for x in inputs))
    torch.testing.assert_close(_without_gradients(mechanism, inputs, False), expected.float().detach())


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_grouped_heads_and_other_value_sizes_in_blocks(small_blocks, causal):
    mechanism = build_mechanism(
        "fmm", num_heads=6, num_kv_heads=2, head_dim=8, bandwidth=5, normalizer="joint"
    ).double()
    q = torch.randn(2, 6, 140, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 140, d, dtype=torch.float64) for d in (8, 5))
    assert_same_with_gradients(mechanism, q, k, v, 1e-8, causal=causal)


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
    (y,) = recompute(lambda x: (x @ weight,), x, held=[weight])
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


PEAK = """
import resource, sys, torch
from hf_rfattn import build_mechanism
name, causal, features, length = sys.argv[1], sys.argv[2] == "causal", int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
options = {"num_features": features} if features else {}
mechanism = build_mechanism(name, num_heads=4, head_dim=32, **options)
def step(length):
    q, k, v = (torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3))
    mechanism(q, k, v, causal=causal).square().mean().backward()
step(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(length)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


BASE = 8 * 32768 * 4 * 32 * 4 // 1024  # KiB of q, k, v, their gradients, the output and its gradient


def peak(name, causal, features):
    """KiB by which a training step of one layer on 32,768 tokens raises the peak memory of a process."""
    arguments = [name, "causal" if causal else "bidirectional", str(features), "32768"]
    run = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_training_memory_does_not_hold_features(causal):
    """Nine times the features: one tensor of the 512 more is twice BASE, and keeping them would keep at least four.

    What is seen is up to 2.3 BASE more: states of many blocks, their gradients, memory that is not given back.
    """
    few, many = (peak("favor+", causal, features) for features in (64, 576))
    assert few < 2 * BASE
    assert many - few < 4 * BASE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["band", "fmm", "hedgehog"])
def test_training_memory_does_not_hold_scores(name):
    assert peak(name, True, 0) < 2 * BASE
