"""torch.compile and torch.export: one program for all lengths, without graph breaks, and the right values."""

import pytest
import torch
import torch._dynamo
from support.attention import build, draw_qkv
from support.models import hidden, tiny_bert, tiny_gpt2, tiny_llama
from support.variants import over

from hf_rfattn import patch_model
from hf_rfattn.bench import compile_time
from hf_rfattn.bench.settings import CompileSettings

LENGTHS = (37, 64, 100, 151, 97)

compiled_variants = over(
    [
        ("favor+", {}),
        ("favor+", {"trainable": True, "antithetic": True}),
        ("hedgehog", {}),
        ("rff", {}),
        ("band", {"bandwidth": 3, "global_tokens": 2}),
        ("fmm", {"bandwidth": 5, "normalizer": "joint", "global_tokens": 1}),
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
@pytest.mark.parametrize(("make", "variant"), [(tiny_bert, "favor+"), (tiny_gpt2, "favor+"), (tiny_llama, "fmm")])
def test_gradients_of_compiled_models(make, variant):
    """Through the compiler's own autograd; lengths and padding differ."""
    model = patch_model(make(), variant)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in LENGTHS[:4]:
        ids, mask = torch.randint(50, (2, length)), torch.ones(2, length, dtype=torch.long)
        mask[1, -5:] = 0
        options = {} if make is tiny_bert else {"use_cache": False}
        grads = []
        for run in (model, compiled):
            model.zero_grad()
            hidden(run, input_ids=ids, attention_mask=mask, **options)[mask.bool()].square().mean().backward()
            grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for name, expected in grads[0].items():
            torch.testing.assert_close(grads[1][name], expected, rtol=1e-3, atol=1e-4)
    assert graphs() <= 2


@pytest.mark.parametrize("name", ["favor+", "band", "fmm"])
def test_dynamic_shapes_from_the_start(name):
    model = patch_model(tiny_bert(), name)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in LENGTHS:
        ids = torch.randint(50, (2, length))
        torch.testing.assert_close(hidden(compiled, input_ids=ids), hidden(model, input_ids=ids), rtol=1e-4, atol=1e-5)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["favor+", "fmm"])
def test_export_with_dynamic_length(name):
    model = patch_model(tiny_bert(num_hidden_layers=1), name)
    ids, mask = torch.randint(50, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    length = torch.export.Dim("length", min=8, max=150)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    program = torch.export.export(
        model,
        (),
        {"input_ids": ids, "attention_mask": mask},
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,  # guards of tiles hold for all lengths, which is not seen
    ).module()
    for size in (40, 64, 133):
        inputs = {"input_ids": torch.randint(50, (2, size)), "attention_mask": torch.ones(2, size, dtype=torch.long)}
        inputs["attention_mask"][0, :4] = 0
        torch.testing.assert_close(hidden(program, **inputs), hidden(model, **inputs), rtol=1e-4, atol=1e-5)


def test_the_benchmark_of_compile_times():
    """Softmax and favor+ need two programs for three lengths, and no graph breaks."""
    result = compile_time.measure(CompileSettings(lengths=(32, 48, 64), backend="eager"))
    assert [row["attention"] for row in result["rows"]] == ["softmax", "favor+"]
    for row in result["rows"]:
        assert row["programs"] == [1, 2, 2] and row["graph_breaks"] == 0
