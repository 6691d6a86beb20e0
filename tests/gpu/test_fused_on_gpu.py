"""The compiled kernels against the torch path, which runs on the same device, and the device against the CPU."""

import warnings

import pytest
import torch
from support.gpus import COMPILER, DEVICE, no_waiting
from support.models import lively, tiny_llama
from support.variants import every_mechanism, every_variant, over
from torch._dynamo.utils import counters

from hf_rfattn import build_mechanism, patch_model
from hf_rfattn.ops import backend

D = 32


def draw(variant, length, dtype, kv_heads=2):
    name, options = variant
    mechanism = build_mechanism(name, num_heads=4, num_kv_heads=kv_heads, head_dim=D, **options).to(DEVICE)
    tensors = [torch.randn(2, heads, length, D, device=DEVICE, dtype=dtype) for heads in (4, kv_heads, kv_heads)]
    return mechanism, [x.requires_grad_() for x in tensors]


def outputs_and_gradients(mechanism, inputs, **masks):
    out = mechanism(*inputs, **masks)
    leaves = [*inputs, *mechanism.parameters()]
    weight = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_equals_torch(variant, causal, dtype):
    for length in (1, 63, 300):
        mechanism, inputs = draw(variant, length, dtype)
        key_mask = torch.rand(2, length, device=DEVICE) > 0.3
        segments = (torch.rand(2, length, device=DEVICE) > 0.97).long().cumsum(1)
        for masks in ({}, {"key_mask": key_mask}, {"key_mask": key_mask, "segments": segments}):
            found = {}
            for name in ("torch", "fused"):
                backend.set_backend(name)
                found[name] = outputs_and_gradients(mechanism, inputs, causal=causal, **masks)
            for a, b in zip(found["fused"], found["torch"], strict=True):
                if a is not None or b is not None:
                    assert (a - b).float().norm() <= backend.TOLERANCE[dtype] * b.float().norm() + 1e-3


@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_checks_pass(variant, causal):
    """A kernel that is supported must not fail its comparison, which would warn."""
    mechanism, inputs = draw(variant, 200, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The fused kernel")
        mechanism(*inputs, causal=causal)


@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_gpu_equals_cpu(variant, causal):
    backend.set_backend("torch")
    mechanism, inputs = draw(variant, 200, torch.float32)
    out = mechanism(*inputs, causal=causal)
    expected = mechanism.cpu()(*(x.detach().cpu() for x in inputs), causal=causal)
    assert (out.cpu() - expected).norm() <= 0.01 * expected.norm()


@every_mechanism
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_compiled(variant, causal):
    """Whole graphs, with fused kernels where they passed their check: outputs and gradients at two lengths."""
    mechanism, inputs = draw(variant, 200, torch.float32)
    compiled = torch.compile(mechanism, fullgraph=True, backend=COMPILER)
    for length in (200, 333):
        _, inputs = draw(variant, length, torch.float32)
        expected = outputs_and_gradients(mechanism, inputs, causal=causal)
        for a, b in zip(outputs_and_gradients(compiled, inputs, causal=causal), expected, strict=True):
            if a is not None or b is not None:
                assert (a - b).norm() <= backend.TOLERANCE[torch.float32] * b.norm() + 1e-3


@over([("favor+", {}), ("hedgehog", {}), ("band", {}), ("fmm", {}), ("multipole", {"block": 8, "tile": 16})])
def test_lengths_share_their_kernels(variant):
    """After some lengths nothing is compiled any more: lengths of one block and several, of whole blocks and tiles."""
    backend.set_backend("fused")
    for length in (150, 300, 216, 320, 200, 417, 640, 131):
        mechanism, inputs = draw(variant, length, torch.float32)
        before = counters["stats"]["unique_graphs"]
        outputs_and_gradients(mechanism, inputs, causal=True)
        outputs_and_gradients(mechanism, inputs)
        assert length in (150, 300, 216, 320) or counters["stats"]["unique_graphs"] == before


@every_mechanism
@torch.no_grad()
def test_a_step_of_generation_does_not_synchronise(variant):
    mechanism, inputs = draw(variant, 20, torch.float32)
    for room in [(), (64,)] if mechanism.holds_all_keys else [()]:
        state = mechanism.new_state(2, D, torch.float32, DEVICE, *room)
        mechanism(*inputs, state=state)
        step = [x[:, :, -1:].clone() for x in inputs]
        mechanism(*step, state=state)
        with no_waiting():
            mechanism(*step, state=state)


@every_mechanism
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(variant, cache):
    """`generate` with a state gives what it gives without; it compiles the steps of static caches on a GPU."""
    model = patch_model(lively(tiny_llama(num_hidden_layers=1)), variant[0]).to(DEVICE)
    tokens = torch.randint(1, 50, (2, 30)).to(DEVICE)
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    whole = model.generate(tokens, use_cache=False, **settings)
    assert torch.equal(model.generate(tokens, cache_implementation=cache, **settings), whole)
