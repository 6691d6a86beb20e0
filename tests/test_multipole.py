"""What is special to multipole attention; the rest is in the suite over the registry."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from hf_rfattn import MultipoleConfig, build_mechanism
from hf_rfattn.ops.multipole_choice import Sizes, best_first, content_code, moments, orders, prefers_content


def draw(length, heads=4, head_dim=8, size=1.0):
    return [size * torch.randn(2, heads, length, head_dim, dtype=torch.float64) for _ in range(3)]


def relative(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, 100, 128])
def test_short_inputs_are_softmax_by_torch(monkeypatch, length, causal):
    """Outputs and gradients, because it is `scaled_dot_product_attention` that is called, once and for all heads."""
    mechanism = build_mechanism("multipole", num_heads=4, head_dim=8)
    q, k, v = (x.requires_grad_() for x in draw(length))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    calls, original = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **b: calls.append(a) or original(*a, **b))
    out = mechanism(q, k, v, causal=causal)
    assert len(calls) == 1
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), cotangent) for o in (out, exact)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("order", ["position", "content", "auto"])
def test_more_exact_keys_bring_it_closer_to_softmax(order, causal):
    q, k, v = draw(200, size=1.5)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    options = {"block": 4, "tile": 8, "order": order}
    errors = [
        relative(
            build_mechanism("multipole", num_heads=4, head_dim=8, exact_keys=keys, **options)(q, k, v, causal=causal),
            exact,
        )
        for keys in (16, 64, 128, 200)
    ]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-12


def test_it_finds_the_keys_that_matter():
    """Each query is drawn to a passage that is far away: a band sees none of it, multipole all of it."""
    torch.manual_seed(0)
    length = 512
    k = 4 * torch.randn(1, 1, length // 32, 16).repeat_interleave(32, dim=2) + torch.randn(1, 1, length, 16)
    q, v = k.roll(200, dims=2), torch.randn(1, 1, length, 16)
    exact = F.scaled_dot_product_attention(q, k, v)
    shape = {"num_heads": 1, "head_dim": 16}
    found = relative(build_mechanism("multipole", exact_keys=128, **shape)(q, k, v), exact)
    band = relative(build_mechanism("band", bandwidth=64, **shape)(q, k, v), exact)
    assert found < 0.2 < 0.9 < band


def test_the_first_token_sees_all_and_is_seen_by_all():
    q, k, v = draw(300)
    exact = F.scaled_dot_product_attention(q, k, v)
    for order in ("position", "content"):
        mechanism = build_mechanism("multipole", num_heads=4, head_dim=8, exact_keys=32, block=8, order=order)
        torch.testing.assert_close(mechanism(q, k, v)[:, :, 0], exact[:, :, 0])
        one = torch.zeros_like(v)
        one[:, :, 0] = 1.0
        weight = mechanism.attention_weights(q, k)[..., 0]
        torch.testing.assert_close(mechanism(q, k, one)[..., 0], weight)
        assert (weight[:, :, 1:].std(-1) > 0).all()


def test_ties_go_to_the_first():
    scores = torch.tensor([[0.0, -1.0, 0.0, 2.0, -torch.inf, 0.0, -0.0]])
    for dtype in (torch.float32, torch.float64):
        assert sorted(best_first(scores.to(dtype), 3)[0].tolist()) == [0, 2, 3]


def test_content_order_separates_clusters():
    """Two clusters, mixed in position: no block holds tokens of both."""
    cluster = torch.rand(1, 3, 64) > 0.5
    cluster[..., :32], cluster[..., 32:] = cluster[..., :32], ~cluster[..., :32]
    y = torch.randn(1, 3, 64, 8) + 20 * cluster.unsqueeze(-1)
    order, _ = orders(y, y, None, None, Sizes(8, 16, 2), "content", 1.0)
    assert torch.equal(order.sort(dim=-1).values, torch.arange(64).expand(1, 3, 64))
    blocks = cluster.gather(2, order).unflatten(2, (-1, 8)).float().mean(-1)
    assert ((blocks == 0) | (blocks == 1)).all()


@pytest.mark.parametrize("padding", [0, 5])
def test_content_order_leaves_the_first_blocks_in_place(padding):
    y = torch.randn(1, 3, 64, 8)
    seen = (torch.arange(64) >= padding)[None, None] if padding else None
    order, _ = orders(y, y, seen, seen, Sizes(8, 16, 2, first=1), "content", 1.0)
    assert torch.equal(order[..., :8], torch.arange(padding, padding + 8).expand(1, 3, 8))


def test_content_code_is_a_gray_code():
    """Corners of a cube, in the order of their codes, differ in one coordinate from the one before."""
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    code = content_code(corners, torch.zeros(3), torch.tensor([3.0, 1.0, 2.0]))
    assert sorted(code.tolist()) == list(range(8))
    assert ((corners[code.argsort()].diff(dim=0) != 0).sum(-1) == 1).all()


def test_auto_orders_diffuse_heads_by_content():
    q, k, _ = draw(64, heads=2)
    q[:, 1], k[:, 1] = 10 * q[:, 1], 10 * k[:, 1]
    assert prefers_content(moments(q, None)[1], moments(k, None)[1], 8**-0.5).tolist() == [[True, False]] * 2


def test_sequences_of_a_batch_get_the_sizes_they_get_alone():
    """Defaults depend on the length: two sequences of 600 and 500 tokens have different blocks."""
    mechanism = build_mechanism("multipole", num_heads=2, head_dim=8)
    q, k, v = (torch.randn(2, 2, 600, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(600) >= torch.tensor([[0], [100]])
    out = mechanism(q, k, v, key_mask=mask)
    torch.testing.assert_close(out[:1], mechanism(q[:1], k[:1], v[:1]))
    torch.testing.assert_close(out[1:, :, 100:], mechanism(*(x[1:, :, 100:] for x in (q, k, v))))


@pytest.mark.parametrize("options", [{"tile": 6}, {"exact_keys": 8, "block": 8}, {"order": "size"}, {"block": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MultipoleConfig(**options)


PEAK = """
import resource, sys, torch
from hf_rfattn import build_mechanism
torch.set_num_threads(1)
mechanism = build_mechanism("multipole", num_heads=4, head_dim=32)
def step(length):
    q, k, v = (torch.randn(1, 4, length, 32, requires_grad=True) for _ in range(3))
    mechanism(q, k, v).square().mean().backward()
step(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(32768)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_training_memory_is_linear():
    """Less than twice what q, k, v, copies of them in order and all gradients take; scores of all queries with all
    blocks would be four times as much.
    """
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    token = 4 * 32 * 4 / 1024  # KiB
    assert int(run.stdout) < 2 * 14 * 32768 * token
