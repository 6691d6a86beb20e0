"""The compiled kernels against the torch path, which runs on the same device, and the device against the CPU."""

import warnings

import pytest
import torch
from support.variants import every_mechanism, every_variant

from hf_rfattn import build_mechanism
from hf_rfattn.ops import backend

D = 32


@pytest.fixture(autouse=True)
def back_to_auto():
    yield
    backend.set_backend("auto")


def draw(variant, length, dtype, kv_heads=2):
    name, options = variant
    mechanism = build_mechanism(name, num_heads=4, num_kv_heads=kv_heads, head_dim=D, **options).cuda()
    tensors = [torch.randn(2, heads, length, D, device="cuda", dtype=dtype) for heads in (4, kv_heads, kv_heads)]
    return mechanism, [x.requires_grad_() for x in tensors]


def outputs_and_gradients(mechanism, inputs, **masks):
    out = mechanism(*inputs, **masks)
    leaves = [*inputs, *mechanism.parameters()]
    weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_equals_torch(variant, causal, dtype):
    for length in (1, 63, 300):
        mechanism, inputs = draw(variant, length, dtype)
        key_mask = torch.rand(2, length, device="cuda") > 0.3
        segments = (torch.rand(2, length, device="cuda") > 0.97).long().cumsum(1)
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
def test_a_step_of_generation_does_not_synchronise(variant):
    mechanism, inputs = draw(variant, 20, torch.float32)
    state = mechanism.new_state(2, D, torch.float32, "cuda")
    with torch.no_grad():
        mechanism(*inputs, state=state)
        step = [x[:, :, -1:].detach().clone() for x in inputs]
        mechanism(*step, state=state)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            mechanism(*step, state=state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
