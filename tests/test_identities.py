"""Identities: where a mechanism must be softmax itself."""

import pytest
import torch
from support.attention import build, draw_qkv
from support.models import tiny_bert

from hf_rfattn import build_mechanism, patch_model
from hf_rfattn.ops import softmax_attention

MASKS = {
    "plain": {},
    "padding": {"key_mask": torch.arange(100)[None] < torch.tensor([[100], [61]])},
    "packing": {"segments": (torch.arange(100) // 33)[None].expand(2, -1)},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("band", {"bandwidth": 100}),
        ("band", {"bandwidth": 5, "global_tokens": 100}),
        ("fmm", {"bandwidth": 99, "normalizer": "joint"}),
        ("fmm", {"bandwidth": 1000, "normalizer": "joint", "far": ("hedgehog", "elu")}),
        ("fmm", {"bandwidth": 7, "normalizer": "joint", "global_tokens": 100}),
    ],
)
def test_wide_near_field_is_softmax(name, options, causal, masks):
    q, k, v = 3 * torch.randn(2, 4, 100, 8), 3 * torch.randn(2, 2, 100, 8), torch.randn(2, 2, 100, 8)
    mechanism = build_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=8, **options)
    expected = softmax_attention(q, k, v, causal=causal, **MASKS[masks])
    torch.testing.assert_close(mechanism(q, k, v, causal=causal, **MASKS[masks]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masks", [{"causal": True}, {"key_mask": torch.arange(30)[None].expand(2, -1) < 20}])
def test_exact_heads_are_softmax_and_the_others_are_not_changed(masks):
    """With grouped queries: heads 0 to 3 read key head 0, heads 4 to 7 key head 1."""
    mechanism = build(("exact_heads", {"heads": (1, 5, 6)}), heads=8, kv_heads=2)
    q, k, v = draw_qkv(30, heads=8, kv_heads=2)
    out, rest = mechanism(q, k, v, **masks), [0, 2, 3, 4, 7]
    torch.testing.assert_close(out[:, [1, 5, 6]], softmax_attention(q, k, v, **masks)[:, [1, 5, 6]])
    torch.testing.assert_close(out[:, rest], mechanism.rest(q, k, v, **masks)[:, rest])


def test_average_is_the_mean_of_visible_values():
    v = torch.randn(2, 4, 9, 8)
    mechanism = build_mechanism("average", num_heads=4, head_dim=8)
    torch.testing.assert_close(mechanism(v, v, v), v.mean(2, keepdim=True).expand_as(v))


def test_many_features_approach_softmax():
    """favor+ is unbiased, so with very many features the whole attention comes close."""
    q, k, v = (0.5 * torch.randn(3, 1, 2, 50, 8)).unbind(0)
    exact = softmax_attention(q, k, v)
    errors = []
    for count in (16, 16384):
        mechanism = build_mechanism("favor+", num_heads=2, head_dim=8, num_features=count)
        errors.append(float((mechanism(q, k, v) - exact).norm() / exact.norm()))
    assert errors[1] < 0.05 < errors[0]


def test_a_long_forward_through_a_model():
    model = patch_model(tiny_bert(max_position_embeddings=32768, num_hidden_layers=1, num_attention_heads=2), "fmm")
    with torch.no_grad():
        out = model(torch.randint(50, (1, 32768))).last_hidden_state
    assert out.shape == (1, 32768, 32) and torch.isfinite(out).all()
