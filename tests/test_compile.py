"""torch.compile and torch.export: one program for all lengths, without graph breaks, and the right values."""

import pytest
import torch
import torch._dynamo
from support.attention import D, build, draw_qkv
from support.models import gradients, hidden, ids, tiny_bert, tiny_llama
from support.variants import every_mechanism, over

from hf_rfattn import patch_model

LENGTHS = (37, 64, 100, 151, 97)

compiled_variants = over(
    [
        ("favor+", {}),
        ("favor+", {"trainable": True, "antithetic": True}),
        ("hedgehog", {}),
        ("rff", {}),
        ("band", {"bandwidth": 3, "global_tokens": 2}),
        ("fmm", {"bandwidth": 5, "normalizer": "joint", "global_tokens": 1}),
        ("multipole", {"exact_keys": 32, "block": 8, "tile": 16}),
    ]
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@compiled_variants
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_two_programs_serve_all_lengths(variant, causal):
    """One for the first length, and one for all others, as softmax has them."""
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    compiled = torch.compile(
        lambda q, k, v, m: mechanism(q, k, v, key_mask=m, causal=causal), backend="eager", fullgraph=True
    )
    for length in LENGTHS:
        q, k, v = draw_qkv(length, kv_heads=2, dtype=torch.float32)
        mask = torch.rand(2, length) > 0.3
        expected = mechanism(q, k, v, key_mask=mask, causal=causal)
        torch.testing.assert_close(compiled(q, k, v, mask), expected, rtol=1e-4, atol=1e-5)
    assert graphs() <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), [(tiny_bert, "favor+"), (tiny_llama, "fmm")])
def test_gradients_of_compiled_models(make, name):
    """Through the compiler's own autograd; lengths and padding differ."""
    model = patch_model(make(num_hidden_layers=1), name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in LENGTHS[:3]:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, :5] = 0
        inputs = {"input_ids": ids(2, length), "attention_mask": mask, "use_cache": False}
        out, expected = gradients(model, **inputs)
        found_out, found = gradients(compiled, **inputs)
        torch.testing.assert_close(found_out, out, rtol=1e-3, atol=1e-4)
        for parameter, grad in expected.items():
            torch.testing.assert_close(found[f"_orig_mod.{parameter}"], grad, rtol=1e-3, atol=1e-4)
    assert graphs() <= 2


def training_step(function, inputs, cotangent, **masks):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, **masks)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)]


@pytest.mark.slow
@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_compiled_training_equals_eager(variant, causal):
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    inputs = draw_qkv(70, kv_heads=2, dtype=torch.float32)
    masks = {"causal": causal, "key_mask": torch.rand(2, 70) > 0.3}
    cotangent = torch.randn(2, 4, 70, D)
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    expected = training_step(mechanism, inputs, cotangent, **masks)
    for found, exact in zip(training_step(compiled, inputs, cotangent, **masks), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_bert, tiny_llama])
@torch.no_grad()
def test_compiled_inference_equals_eager(make):
    """With padding and without; forward of other mechanisms: above."""
    model = patch_model(make(num_hidden_layers=1), "fmm")
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :20] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for masks in ({"attention_mask": mask}, {}):
        inputs = {"input_ids": ids(2, 70), "use_cache": False, **masks}
        torch.testing.assert_close(hidden(compiled, **inputs), hidden(model, **inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_inductor_code_equals_eager():
    """The default backend generates code of its own: near and far field of a causal mechanism in training."""
    mechanism = build(("fmm", {"bandwidth": 5}), dtype=torch.float32)
    inputs, cotangent = draw_qkv(70, dtype=torch.float32), torch.randn(2, 4, 70, D)
    compiled = torch.compile(mechanism, fullgraph=True)
    expected = training_step(mechanism, inputs, cotangent, causal=True)
    for found, exact in zip(training_step(compiled, inputs, cotangent, causal=True), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["favor+", "band", "fmm"])
def test_dynamic_shapes_from_the_start(name):
    model = patch_model(tiny_bert(num_hidden_layers=1), name)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in LENGTHS:
        tokens = ids(2, length)
        torch.testing.assert_close(
            hidden(compiled, input_ids=tokens), hidden(model, input_ids=tokens), rtol=1e-4, atol=1e-5
        )
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["favor+", "fmm"])
def test_export_with_dynamic_length(name):
    model = patch_model(tiny_bert(num_hidden_layers=1), name)
    tokens, mask = ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    length = torch.export.Dim("length", min=8, max=150)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    program = torch.export.export(
        model,
        (),
        {"input_ids": tokens, "attention_mask": mask},
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,  # guards of tiles hold for all lengths, which is not seen
    ).module()
    for size in (40, 64, 133):
        inputs = {"input_ids": ids(2, size), "attention_mask": torch.ones(2, size, dtype=torch.long)}
        inputs["attention_mask"][0, :4] = 0
        torch.testing.assert_close(hidden(program, **inputs), hidden(model, **inputs), rtol=1e-4, atol=1e-5)
