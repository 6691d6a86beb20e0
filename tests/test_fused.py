"""Fused kernels without a GPU: FlexAttention unfused and gated linear attention as a plain recurrence, on a CPU that
passes for a GPU. Mathematics, masks, gradients, dispatch and the check at first use are tested; kernels are not.
"""

import importlib.util
import json
import math
import sys
import warnings
from contextlib import nullcontext
from importlib.metadata import distribution

import gpu_prediction
import pytest
import torch
import torch._dynamo.testing
from support.attention import assert_same_with_gradients, build, definition, draw_qkv
from support.gpus import NoSync, pass_for_a_gpu, recurrence
from support.models import tiny_gpt2, tiny_llama
from support.variants import every_mechanism, every_variant, over
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import DynamicCache, StaticCache

import hf_rfattn
from hf_rfattn.bench import decode, model, ops
from hf_rfattn.bench.settings import DecodeSettings, ModelSettings, OpsSettings
from hf_rfattn.cli import app
from hf_rfattn.cli.doctor import calls
from hf_rfattn.install import install_command
from hf_rfattn.ops import backend, fused, multipole


@pytest.fixture
def gpu(monkeypatch):
    """The switch is at auto, and nothing was checked yet."""
    pass_for_a_gpu(monkeypatch)
    yield backend
    backend.set_backend("auto")


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_its_definition(gpu, variant, causal):
    gpu.set_backend("fused")
    mechanism = build(variant, heads=2, kv_heads=1)
    for length in (1, 7, 150):
        q, k, v = draw_qkv(length, heads=2, kv_heads=1)
        key_mask = torch.rand(2, length) > 0.4
        segments = (torch.rand(2, length) > 0.97).long().cumsum(1)
        for masks in ({}, {"key_mask": key_mask, "scale": 0.7}, {"key_mask": key_mask, "segments": segments}):
            assert_same_with_gradients(mechanism, q, k, v, 1e-6, causal=causal, **masks)


FUSED = [
    ("favor+", {}),
    ("favor+", {"trainable": True}),
    ("hedgehog", {}),
    ("band", {}),
    ("fmm", {}),
    ("multipole", {"exact_keys": 32, "block": 8, "tile": 16}),
]


@over([*FUSED, ("fmm", {"normalizer": "separate"})])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_row_with_nothing_visible_gives_zeros(gpu, variant, causal):
    gpu.set_backend("fused")
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in draw_qkv(70, dtype=torch.float32))
    key_mask = torch.ones(2, 70, dtype=torch.bool)
    key_mask[1] = False
    out = mechanism(q, k, v, key_mask=key_mask, causal=causal)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and out[0].abs().sum() > 0
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v), materialize_grads=True):
        assert torch.isfinite(grad).all() and torch.equal(grad[1], torch.zeros_like(grad[1]))


@over([("favor+", {}), ("favor+", {"trainable": True}), ("hedgehog", {}), ("band", {}), ("fmm", {})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(gpu, variant, dtype):
    gpu.set_backend("fused")
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = draw_qkv(100, dtype=torch.float32)
    expected = definition(mechanism, q, k, v)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = mechanism(*leaves)
    assert out.dtype == dtype and (out - expected).norm() < 0.02 * expected.norm()
    for grad in torch.autograd.grad(out.float().square().sum(), leaves):
        assert grad.dtype == dtype and torch.isfinite(grad).all()


@pytest.mark.parametrize(("past", "later"), [(20.0, 0.05), (0.05, 20.0)])
def test_offsets_of_causal_features(gpu, past, later):
    """Later keys with much larger or smaller features neither swallow earlier ones nor are swallowed."""
    mechanism = build(("favor+", {}), dtype=torch.float32)
    q, k, v = draw_qkv(150, dtype=torch.float32)
    size = torch.where(torch.arange(150) < 70, past, later)[:, None]
    found = {}
    for name in ("torch", "fused"):
        gpu.set_backend(name)
        found[name] = mechanism(q * size, k * size, v, causal=True)
    torch.testing.assert_close(found["fused"], found["torch"], rtol=1e-3, atol=1e-4)


@over([("favor+", {}), ("hedgehog", {}), ("fmm", {"normalizer": "joint"})])
def test_generation_goes_on_from_a_fused_prompt(gpu, variant):
    gpu.set_backend("fused")
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    q, k, v = draw_qkv(90, kv_heads=2, dtype=torch.float32)
    state = mechanism.new_state(2, 8, torch.float32, "cpu")
    with torch.no_grad():
        parts = [mechanism(*(x[:, :, at] for x in (q, k, v)), state=state) for at in (slice(0, 60), slice(60, 89))]
        parts.append(mechanism(*(x[:, :, 89:] for x in (q, k, v)), state=state))
    assert gpu.decisions["causal"] is None
    torch.testing.assert_close(torch.cat(parts, dim=2), definition(mechanism, q, k, v, causal=True))


def test_tiles_beyond_the_largest_batch_of_a_kernel(gpu, monkeypatch):
    monkeypatch.setattr(multipole, "LARGEST_BATCH", 16)
    gpu.set_backend("fused")
    mechanism = build(("multipole", {"exact_keys": 16, "block": 4, "tile": 8}), kv_heads=2)
    for masks in ({}, {"key_mask": torch.rand(2, 60) > 0.4}):  # 16 tiles a sequence and key head
        assert_same_with_gradients(mechanism, *draw_qkv(60, kv_heads=2), 1e-6, **masks)


COMPILED = [(variant, "bidirectional") for variant in FUSED if variant[0] != "fmm"]  # which is band and favor+
COMPILED += [
    (variant, form) for variant in FUSED if variant[0] in ("band", "multipole") for form in ("causal", "packed")
]


@pytest.mark.parametrize(("variant", "form"), COMPILED, ids=lambda x: x if isinstance(x, str) else x[0])
def test_compiled_once_for_all_lengths(gpu, variant, form, monkeypatch):
    count = torch._dynamo.testing.CompileCounterWithBackend("eager")
    monkeypatch.setattr(fused, "COMPILER", count)
    gpu.set_backend("fused")
    torch._dynamo.reset()
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)

    def run(length):
        q, k, v = (x.requires_grad_() for x in draw_qkv(length, kv_heads=2, dtype=torch.float32))
        masks = {"key_mask": torch.rand(2, length) > 0.3, "causal": form != "bidirectional"}
        if form == "packed":
            masks["segments"] = 2 * torch.arange(length).expand(2, -1) // length
        mechanism(q, k, v, **masks).sum().backward()

    for length in (150, 300, 320):  # of one block, of several, and of whole tiles
        run(length)
    before = count.frame_count
    for length in (200, 417, 640, 131):
        run(length)
    assert count.frame_count == before
    assert set(gpu.decisions.values()) == {None}


@over(FUSED)
def test_inside_a_compiled_model(gpu, variant):
    gpu.set_backend("fused")
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = draw_qkv(50, dtype=torch.float32)
    compiled = torch.compile(mechanism, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves)
    torch.testing.assert_close(out, definition(mechanism, q, k, v), rtol=1e-4, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(mechanism(*leaves).square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def reference(q, k, v, gate, state):
    """The same by flash-linear-attention: the package needs triton to be imported, so the file is loaded by itself."""
    path = distribution("fla-core").locate_file("fla/ops/gla/naive.py")
    spec = importlib.util.spec_from_file_location("fla_gla_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q = math.sqrt(q.shape[3]) * q  # it divides by that
    tokens = (x.transpose(1, 2) for x in (q, k, v, gate))
    out, state = module.naive_recurrent_gla(*tokens, initial_state=state, output_final_state=True)
    return out.transpose(1, 2), state


def test_the_recurrence_is_that_of_flash_linear_attention():
    q, k, v = (torch.randn(2, 3, 20, 6, requires_grad=True) for _ in range(3))
    gate = torch.nn.functional.logsigmoid(torch.randn(2, 3, 20, 6))
    state = torch.randn(2, 3, 6, 6)
    (theirs, after), (ours, ours_after) = (function(q, k, v, gate, state) for function in (reference, recurrence))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_after, after)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (theirs, ours)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@over([("favor+", {}), ("hedgehog", {}), ("linear", {}), ("fmm", {"bandwidth": 5})])
def test_causal_attention_by_the_reference_of_flash_linear_attention(gpu, variant, monkeypatch):
    """Gates, scales, masks and segments are right for their function, not for ours alone."""
    monkeypatch.setattr(fused, "_gated_linear_attention", reference)
    gpu.set_backend("fused")
    mechanism = build(variant, heads=2, kv_heads=1, dtype=torch.float32)
    q, k, v = draw_qkv(40, heads=2, kv_heads=1, dtype=torch.float32)
    masks = {"key_mask": torch.rand(2, 40) > 0.3, "segments": torch.arange(40).expand(2, -1) // 15}
    assert_same_with_gradients(mechanism, q, k, v, 1e-4, causal=True, **masks)
    assert gpu.decisions["causal"] is None


def test_layout_of_the_kernel_call(monkeypatch):
    """`chunk_gla` takes [B, L, H, D], a scale of one, and a state."""
    seen = {}

    def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False):
        seen.update(scale=scale, shapes=[tuple(x.shape) for x in (q, k, v, g, initial_state)])
        out, state = recurrence(*(x.transpose(1, 2) for x in (q, k, v, g)), initial_state)
        return out.transpose(1, 2), state if output_final_state else None

    module = type(torch)("fla.ops.gla")
    module.chunk_gla = chunk_gla
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, type(torch)(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gla", module)
    inputs = [torch.rand(2, 3, 5, size) for size in (6, 6, 7, 6)] + [torch.rand(2, 3, 6, 7)]
    for a, b in zip(fused._gated_linear_attention(*inputs), recurrence(*inputs), strict=True):
        torch.testing.assert_close(a, b)
    assert seen == {"scale": 1.0, "shapes": [(2, 5, 3, 6), (2, 5, 3, 6), (2, 5, 3, 7), (2, 5, 3, 6), (2, 3, 6, 7)]}


# Dispatch.


def some_call(variant=("favor+", {}), **masks):
    mechanism = build(variant, dtype=torch.float32)
    inputs = draw_qkv(40, dtype=torch.float32)
    return mechanism(*inputs, **masks), definition(mechanism, *inputs, **masks)


def test_nothing_is_fused_on_a_cpu():
    backend.decisions.clear()
    some_call()
    assert backend.decisions == {} == backend.checks


def test_torch_is_never_fused(gpu):
    gpu.set_backend("torch")
    some_call()
    assert gpu.decisions == {} == gpu.checks


def test_auto_checks_an_operator_once(gpu, monkeypatch):
    calls = []
    run = gpu._compare
    monkeypatch.setattr(gpu, "_compare", lambda operator, *rest: (calls.append(operator), run(operator, *rest))[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The fused kernel")
        for _ in range(2):
            some_call()
            some_call(("fmm", {}), causal=True)
    assert calls == ["linear", "band", "causal"]
    assert gpu.decisions == dict.fromkeys(calls)
    assert set(gpu.checks.values()) == {None}


def wrong_forward(q, k, v, score_mod, block_mask, scale, grouped):
    out, lse = FLEX(q, k, v, score_mod, block_mask, scale, grouped)
    return out * 1.1, lse


def wrong_backward(q, k, v, score_mod, block_mask, scale, grouped):
    out, lse = FLEX(q, k, v, score_mod, block_mask, scale, grouped)
    return out + (v - v.detach()).mean(), lse


def raises(*arguments):
    raise RuntimeError("out of resource: shared memory")


FLEX = fused._flex


@pytest.mark.parametrize("kernel", [wrong_forward, wrong_backward, raises])
def test_a_broken_kernel_is_not_used(gpu, monkeypatch, kernel):
    monkeypatch.setattr(fused, "_flex", kernel)
    with pytest.warns(UserWarning, match=r"'linear' failed its check on cpu .*hf-rfattn doctor"):
        out, expected = some_call()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    message = "shared memory" if kernel is raises else "differs from the torch path"
    assert message in gpu.decisions["linear"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The fused kernel")  # it warns once
        some_call()
    gpu.set_backend("fused")
    if kernel is raises:
        with pytest.raises(RuntimeError, match="shared memory"):
            some_call()


def test_a_broken_recurrence_is_not_used(gpu, monkeypatch):
    def broken(q, k, v, gate, state):
        return recurrence(q, k, v, torch.zeros_like(gate), state)

    monkeypatch.setattr(fused, "_gated_linear_attention", broken)
    with pytest.warns(UserWarning, match="'causal' failed its check"):
        out, expected = some_call(causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_inference_mode(gpu):
    with torch.inference_mode():
        out, expected = some_call(("favor+", {"trainable": True}))
    assert gpu.decisions == {"linear": None}
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "masks", "reason"),
    [
        (("linear", {}), {}, {"linear": "features are not log-linear"}),
        (("rff", {}), {"causal": True}, {"causal": "features are signed"}),
    ],
)
def test_unsupported_calls_say_why(gpu, variant, masks, reason):
    some_call(variant, **masks)
    assert gpu.decisions == reason


def test_reasons(gpu, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(backend, "DEVICES", ("cpu",))
    some_call()
    assert backend.decisions["linear"] == "the head size is below 16"
    monkeypatch.setattr(backend, "SMALLEST_HEAD", 1)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    some_call()
    assert "triton is not installed" in backend.decisions["linear"]
    monkeypatch.setattr(backend, "find_spec", lambda name: None if name == "fla" else name)
    some_call(causal=True)
    assert install_command("gpu") in backend.decisions["causal"]
    build(("favor+", {}))(*draw_qkv(20))
    assert backend.decisions["linear"] == "torch.float64 is not supported"


def test_unknown_backends():
    with pytest.raises(ValueError, match="Unknown backend 'cuda'; choose one of auto, torch, fused"):
        hf_rfattn.set_backend("cuda")
    assert backend.get_backend() == "auto"


# hf-rfattn doctor.


def test_doctor_without_a_gpu(capsys):
    app(["doctor"], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in said and "backend       auto" in said
    if not torch.cuda.is_available():
        assert "No GPU is visible to torch" in said
    app(["doctor", "--json"], standalone_mode=False)
    assert set(json.loads(capsys.readouterr().out)["operators"]) == set(backend.OPERATORS)


def test_doctor_says_what_a_device_runs_on(gpu, monkeypatch):
    monkeypatch.setattr("hf_rfattn.mechanisms.mechanism_names", lambda: ["favor+", "linear"])
    gpu.set_backend("auto")
    found = {(c["attention"], c["form"], c["dtype"]): c["kernels"] for c in calls(torch.device("cpu"))}
    assert len(found) == 8
    assert found["favor+", "bidirectional", "bfloat16"] == "linear: fused"
    assert found["favor+", "causal", "float32"] == "causal: fused"
    assert found["linear", "bidirectional", "float32"] == "linear: features are not log-linear"
    monkeypatch.setattr(gpu, "checks", {})
    monkeypatch.setattr(fused, "_flex", raises)
    broken = next(c for c in calls(torch.device("cpu")) if c["form"] == "bidirectional")
    assert "out of resource" in broken["kernels"]


# Generation without waiting for the device.


def test_what_waits_is_noticed():
    x = torch.arange(3)
    for wait in (int, torch.nonzero, torch.unique, lambda x: x[x > 1], lambda x: torch.equal(x, x)):
        with pytest.raises(RuntimeError, match="waits"), NoSync():
            wait(x[:1])


@every_variant
@torch.no_grad()
def test_a_step_of_generation_does_not_synchronise(variant):
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    q, k, v = draw_qkv(30, kv_heads=2, dtype=torch.float32)
    expected = definition(mechanism, q, k, v, causal=True)[:, :, 20:]
    for room in [(), (32,)] if mechanism.holds_all_keys else [()]:
        state = mechanism.new_state(2, 8, torch.float32, "cpu", *room)
        mechanism(*(x[:, :, :20] for x in (q, k, v)), state=state)
        with NoSync():
            steps = [mechanism(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state) for t in range(20, 30)]
        torch.testing.assert_close(torch.cat(steps, dim=2), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", hf_rfattn.mechanism_names())
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_a_step_of_a_model_does_not_synchronise(name, static):
    """Neither attention nor its cache, nor what transformers makes of padding masks for them."""
    model = hf_rfattn.patch_model(tiny_llama(num_hidden_layers=1), name)
    cache = StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
    tokens, mask = torch.randint(1, 50, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, :5] = 0
    expected = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    model(input_ids=tokens[:, :27], attention_mask=mask[:, :27], past_key_values=cache)
    for t in range(27, 30):
        arguments = {"input_ids": tokens[:, t : t + 1], "attention_mask": mask[:, : t + 1], "past_key_values": cache}
        with NoSync():
            logits = model(**arguments, position_ids=torch.full((2, 1), t)).logits
        torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)


def test_a_fixed_room_is_not_exceeded():
    mechanism = build(("multipole", {}), dtype=torch.float32)
    state = mechanism.new_state(2, 8, torch.float32, "cpu", 16)
    mechanism(*draw_qkv(16, dtype=torch.float32), state=state)
    with pytest.raises(RuntimeError, match="no room for more tokens"):
        mechanism(*draw_qkv(1, dtype=torch.float32), state=state)


def flex_on_no_device(q, k, v, score_mod, mask, scale, grouped):
    """What kernels do with devices, without numbers."""
    index = [torch.zeros(1, dtype=torch.long, device=q.device)] * 4
    used = q.sum() + k.sum() + v.sum()
    if score_mod is not None:
        used = score_mod(used, *index).sum()
    if mask is not None:
        used = used + mask.mask_mod(*index).sum() + mask.kv_indices.sum() + mask.q_indices.sum()
    return q.new_zeros(*q.shape[:3], v.shape[3]) + used, used.expand(q.shape[:3])


@every_mechanism
@pytest.mark.parametrize("form", ["bidirectional", "causal", "step"])
def test_all_tensors_are_on_the_device(gpu, variant, form, monkeypatch):
    """A device other than the CPU: operations that mix both raise, and so does reading a number."""
    monkeypatch.setattr(backend, "DEVICES", ("meta",))
    monkeypatch.setattr(fused, "_flex", flex_on_no_device)
    monkeypatch.setattr(torch, "autocast", lambda *a, **b: nullcontext())  # does not know this device
    gpu.set_backend("fused")
    mechanism = build(variant, kv_heads=2, dtype=torch.float32).to("meta")
    length, masks = 1 if form == "step" else 150, {}
    if not (variant == ("multipole", {}) and form == "bidirectional"):  # groups padded sequences by length
        masks["key_mask"] = torch.ones(2, length, dtype=torch.bool, device="meta")
    if form == "step":
        masks["state"] = mechanism.new_state(2, 8, torch.float32, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.randn(2, h, length, 8, device="meta", requires_grad=True) for h in (4, 2, 2))
        try:
            out = mechanism(q, k, v, causal=form == "causal", **masks)
        except DataDependentOutputException:
            assert "features are signed" in gpu.decisions.values()  # the torch path looks for products that vanish
            return
        out.sum().backward()
    assert out.device.type == v.grad.device.type == "meta"


def test_predicted_costs_follow_from_shapes():
    device, length = gpu_prediction.DEVICES[0], 4096
    paths = gpu_prediction.paths(length)
    favor, band = (paths[name, False] for name in ("favor+, M = 64, fused", "band 32, fused"))
    assert sum(kernel.operations for kernel in favor) == 8 * 64 * 64  # two products with keys, two with queries
    assert sum(kernel.operations for kernel in band) == 4 * 64 * 3 * 128  # three blocks of keys
    far = 4 * 64 * length / 16  # block means at this length
    assert far in [kernel.operations for kernel in paths["multipole, 128 exact keys, fused", False]]
    for path in paths:
        found = gpu_prediction.break_even(path, device)
        assert (found is None) == (path == ("multipole, 128 exact keys, fused", True))
        if found is None:
            continue
        for length, faster in ((found, True), (0.9 * found, False)):
            seconds = sum(kernel.seconds(device) for kernel in gpu_prediction.paths(length)[path])
            assert (seconds <= gpu_prediction.flash(length, path[1], 64).seconds(device)) == faster


# hf-rfattn bench --paths.


QUICK = {"paths": ("torch", "compiled", "fused"), "repetitions": 1, "threads": 1}


def rows(result):
    """Rows that were measured, and why others were not."""
    measured = list(dict.fromkeys((c["attention"], c["path"]) for c in result["cells"]))
    return measured, {(e["attention"], e["path"]): e["reason"] for e in result["left_out"]}


@pytest.fixture
def compiled_eagerly(monkeypatch):
    """torch.compile without a compiler of machine code, which takes most of the time."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile(function, **{"backend": "eager"} | options)
    )


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    tiny_gpt2().save_pretrained(folder)
    return str(folder)


def test_paths_are_compared_in_one_run(gpu, compiled_eagerly):
    gpu.set_backend("torch")
    settings = OpsSettings(
        attention=["favor+", "linear"], lengths=[40, 48], heads=2, head_dim=16, features=[8], passes=[False], **QUICK
    )
    result = ops.measure(settings)
    names = [("favor+", "torch"), ("favor+", "compiled"), ("favor+", "fused")]
    names += [("linear", "torch"), ("linear", "compiled"), ("linear", "fused")]
    measured, left_out = rows(result)
    assert measured == [("softmax", "torch"), *names[:5], names[5]]  # causal linear attention is gated too
    assert left_out == {("linear", "fused"): "linear: features are not log-linear"}
    assert all(not entry["causal"] for entry in result["left_out"])
    assert gpu.get_backend() == "torch"  # as it was
    for cell in result["cells"]:
        assert ("first_call_seconds" in cell) == (cell["path"] != "torch")
    speed, image, first, notes = ops.report(result, "ops")
    assert [row[1] for row in speed.rows[:4]] == [
        "softmax",
        "favor+, M = 8",
        "favor+, M = 8 (compiled)",
        "favor+, M = 8 (fused)",
    ]
    assert "compiles" in first.title and len(first.rows) == 2 * 3 + 1
    assert notes == "- Not measured: linear, M = 16 (fused): linear: features are not log-linear"
    assert image.draw().axes


def test_each_path_runs_on_its_backend(gpu, compiled_eagerly, monkeypatch):
    """What ran fused is known from the dispatch, at every timed call."""
    seen = []
    monkeypatch.setattr(gpu, "fused", lambda *a, run=gpu.fused, **k: (seen.append(gpu.get_backend()), run(*a, **k))[1])
    settings = OpsSettings(
        attention=["favor+"], lengths=[40], heads=2, head_dim=16, features=[8], directions=[False], passes=[False],
        **QUICK | {"repetitions": 3},
    )  # fmt: skip
    ops.measure(settings)
    assert seen.count("auto") == 1 + 1 + 3 and "torch" in seen  # the first call, a warm-up, and three repetitions


def test_nothing_is_fused_on_a_cpu_and_the_reason_is_told(compiled_eagerly, gpt2):
    result = model.measure(ModelSettings(model=gpt2, attention=["favor+"], lengths=[32], passes=[False], **QUICK))
    measured, left_out = rows(result)
    assert measured == [
        ("softmax", "torch"), ("softmax", "compiled"), ("favor+", "torch"), ("favor+", "compiled"),
    ]  # fmt: skip
    assert left_out == {("favor+", "fused"): "there are no fused kernels for the device 'cpu'"}
    assert list(model.speed_documents(result)) == ["favor+"]


def test_paths_of_models_and_of_generation(gpu, compiled_eagerly, gpt2, monkeypatch):
    monkeypatch.setattr(gpu, "SMALLEST_HEAD", 1)
    settings = ModelSettings(model=gpt2, attention=["favor+"], lengths=[32], passes=[False, True], **QUICK)
    measured, left_out = rows(model.measure(settings))
    assert ("favor+", "fused") in measured and ("softmax", "fused") not in measured and not left_out
    result = decode.measure(DecodeSettings(model=gpt2, attention=["favor+"], contexts=[32], tokens=2, **QUICK))
    measured, left_out = rows(result)
    assert (decode.STATIC, "compiled") in measured and ("softmax", "compiled") not in measured
    assert ("favor+", "compiled") in measured
    assert left_out == {("favor+", "fused"): "it calls no operator that has a fused kernel"}


def test_a_path_that_fails_is_left_out(gpu, monkeypatch):
    def broken(function, **options):
        def call(*arguments, **more):
            raise RuntimeError("no compiler\n was found")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    settings = OpsSettings(attention=["band"], lengths=[40], heads=2, head_dim=16, **QUICK | {"paths": ("compiled",)})
    measured, left_out = rows(ops.measure(settings))
    assert measured == [("softmax", "torch")]
    assert left_out == {("band", "compiled"): "RuntimeError: no compiler was found"}


def test_a_gpu_gets_all_paths_in_half_precision():
    settings = OpsSettings(device="cuda:1")
    assert settings.paths == ("torch", "compiled", "fused") and settings.dtype == "bfloat16"
    assert OpsSettings().paths == ("torch",) and OpsSettings().dtype == "float32"
    assert OpsSettings(device="cuda", paths=["torch"], dtype="float16").paths == ("torch",)
