"""A CPU that passes for a GPU: the logic of fused kernels and of `tests/gpu` without one.

With HF_RFATTN_FAKE_GPU=1 `tests/gpu` runs on such a CPU, to test the tests.
"""

import os
from contextlib import contextmanager

import torch
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rfattn.ops import backend, fused

FAKE = bool(os.environ.get("HF_RFATTN_FAKE_GPU"))
DEVICE, PROCESSES, COMPILER = ("cpu", "gloo", "aot_eager") if FAKE else ("cuda", "nccl", "inductor")


def recurrence(q, k, v, gate, state):
    """Gated linear attention by its definition."""
    outs = []
    for t in range(q.shape[2]):
        state = gate[:, :, t].exp().unsqueeze(-1) * state + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outs.append((q[:, :, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outs, dim=2), state


def pass_for_a_gpu(monkeypatch):
    """The CPU in place of a GPU, and kernels that run on it; nothing was checked yet."""
    monkeypatch.setattr(backend, "DEVICES", ("cpu",))
    monkeypatch.setattr(backend, "SMALLEST_HEAD", 1)
    monkeypatch.setattr(backend, "TOLERANCE", {**backend.TOLERANCE, torch.float64: 1e-6})
    monkeypatch.setattr(backend, "missing", lambda operator: None)
    monkeypatch.setattr(backend, "checks", {})
    monkeypatch.setattr(backend, "decisions", {})
    monkeypatch.setattr(fused, "COMPILER", "eager")
    monkeypatch.setattr(fused, "_gated_linear_attention", recurrence)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # no gradients on CPUs, it says
    monkeypatch.setattr(fused, "_compiled", None)


class NoSync(TorchDispatchMode):
    """Raises where a GPU would have to be waited for."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and isinstance(args[1], (list, tuple)) and _bools(args[1])
        if name in self.waits or by_mask:
            raise RuntimeError(f"{function} waits for the device")
        return function(*args, **(kwargs or {}))


def _bools(tensors):
    return any(x is not None and x.dtype == torch.bool for x in tensors)


@contextmanager
def no_waiting():
    """Raises where the device is waited for."""
    if FAKE:
        with NoSync():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
