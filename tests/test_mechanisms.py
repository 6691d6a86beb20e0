"""One suite over every registered mechanism, on q, k, v alone: the definition, masks, causality, numbers."""

import copy
import itertools
import math
import threading

import pytest
import torch
from support.attention import D, assert_same_with_gradients, build, definition, draw_qkv, tolerance_of
from support.variants import every_mechanism, every_variant

from hf_rfattn import redraw


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("length", [1, 2, 63, 100, 257])
def test_equals_its_definition(variant, length, causal):
    tolerance = tolerance_of(variant)
    mechanism = build(variant, heads=2, kv_heads=1)
    q, k, v = draw_qkv(length, heads=2, kv_heads=1)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal)
    key_mask = torch.rand(2, length) > 0.4
    segments = (torch.rand(2, length) > 0.97).long().cumsum(1)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal, key_mask=key_mask, scale=0.7)
    assert_same_with_gradients(mechanism, q, k, v, tolerance, causal=causal, key_mask=key_mask, segments=segments)


@pytest.mark.slow
@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_its_definition_at_length_2000(variant, causal):
    q, k, v = draw_qkv(2000, batch=1, heads=1)
    key_mask = torch.rand(1, 2000) > 0.4
    assert_same_with_gradients(
        build(variant, heads=1), q, k, v, tolerance_of(variant), causal=causal, key_mask=key_mask
    )


@every_variant
def test_gradcheck(variant):
    mechanism = build(variant, heads=2, kv_heads=1)
    inputs = [x.requires_grad_() for x in draw_qkv(5, 1, heads=2, kv_heads=1)]
    key_mask = torch.tensor([[True, True, False, True, True]])
    for causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, c=causal: mechanism(*x, key_mask=key_mask, causal=c), inputs, fast_mode=True
        )


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_valid_outputs_alone(variant, side, causal):
    """A padded batch gives each sequence what it gets alone, outputs and gradients."""
    mechanism = build(variant, kv_heads=2)
    q, k, v = (x.requires_grad_() for x in draw_qkv(90, kv_heads=2))
    lengths = (90, 71)
    key_mask = torch.stack(
        [(torch.arange(90) >= 90 - n) if side == "left" else (torch.arange(90) < n) for n in lengths]
    )
    out = mechanism(q, k, v, key_mask=key_mask, causal=causal)
    for row, n in enumerate(lengths):
        keep = slice(90 - n, None) if side == "left" else slice(0, n)
        alone = mechanism(*(x[row : row + 1, :, keep] for x in (q, k, v)), causal=causal)
        padded = out[row : row + 1, :, keep]
        torch.testing.assert_close(padded, alone)
        cotangent = torch.randn_like(alone)
        for a, b in zip(
            torch.autograd.grad(padded, (q, k, v), cotangent, retain_graph=True, materialize_grads=True),
            torch.autograd.grad(alone, (q, k, v), cotangent, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_padded_tokens_do_not_matter(variant, causal):
    """Left, right and interior padding at once: whatever stands there, nothing visible changes."""
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = draw_qkv(90, dtype=torch.float32)
    hidden = torch.zeros(2, 90, dtype=torch.bool)
    hidden[:, :7] = hidden[:, 80:] = hidden[1, 30:55] = True
    other_k = torch.where(hidden[:, None, :, None], 30 * torch.randn_like(k), k)
    other_v = torch.where(hidden[:, None, :, None], 30 * torch.randn_like(v), v)
    out = mechanism(q, k, v, key_mask=~hidden, causal=causal)
    assert torch.equal(out, mechanism(q, other_k, other_v, key_mask=~hidden, causal=causal))


@every_variant
def test_interior_padding_can_be_cut_out(variant):
    """Without a band positions mean nothing, so hidden keys in the middle are the same as no keys."""
    mechanism = build(variant)
    if not mechanism.handles_cross_attention:
        pytest.skip("a band counts positions, hidden ones too")
    q, k, v = draw_qkv(90, batch=1)
    visible = torch.ones(1, 90, dtype=torch.bool)
    visible[:, 20:50] = False
    for causal in (False, True):
        cut = mechanism(*(x[:, :, visible[0]] for x in (q, k, v)), causal=causal)
        out = mechanism(q, k, v, key_mask=visible, causal=causal)[:, :, visible[0]]
        torch.testing.assert_close(out, cut)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_row_with_nothing_visible_gives_zeros(variant, causal):
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in draw_qkv(70, dtype=torch.float32))
    key_mask = torch.ones(2, 70, dtype=torch.bool)
    key_mask[1] = False
    out = mechanism(q, k, v, key_mask=key_mask, causal=causal)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().sum() > 0
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v), materialize_grads=True):
        assert torch.isfinite(grad).all()
        assert torch.equal(grad[1], torch.zeros_like(grad[1]))


@every_variant
@pytest.mark.parametrize(("past", "factor"), [(1, 1.0), (1, 20.0), (1, 0.05), (20, 0.05), (0.05, 20.0)])
def test_the_future_does_not_leak(variant, past, factor):
    """Also when later keys are much larger or smaller than earlier ones; across tiles and within them.

    Past keys of size 20 have log-features near -500 and small later ones near 0: on the scale of those, all of the past
    would underflow.
    """
    mechanism = build(variant, kv_heads=2, dtype=torch.float32)
    q, k, v = draw_qkv(200, kv_heads=2, dtype=torch.float32)
    q, k = past * q, past * k
    before = mechanism(q, k, v, causal=True)
    for now in (10, 64, 130):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, now:] = factor * past * torch.randn_like(x[:, :, now:])
        after = mechanism(*changed, causal=True)
        torch.testing.assert_close(after[:, :, :now], before[:, :, :now], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(after[:, :, now:], before[:, :, now:])


@every_variant
@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_large_and_small_keys_stay_exact(variant, factor):
    """Keys that grow or shrink 20-fold along the sequence: float32 still equals the definition in float64."""
    mechanism = build(variant)
    q, k, v = draw_qkv(200)
    k = k * torch.linspace(math.log(1), math.log(factor), 200, dtype=k.dtype).exp()[:, None]
    exact = definition(mechanism, q, k, v, causal=True)
    out = copy.deepcopy(mechanism).float()(q.float(), k.float(), v.float(), causal=True)
    if "tanh" in str(variant) or "normalize_qk" in str(variant):
        assert torch.isfinite(out).all()  # denominators near zero, or a definition that overflows: nothing to compare
    else:
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@every_variant
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_packed_rows_equal_separate_rows(variant, causal):
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(150, batch=1, kv_heads=2)
    bounds = [0, 3, 40, 41, 110, 150]
    segments = torch.zeros(1, 150, dtype=torch.long)
    for number, start in enumerate(bounds[:-1]):
        segments[:, start:] = number
    packed = mechanism(q, k, v, segments=segments, causal=causal)
    for start, end in itertools.pairwise(bounds):
        alone = mechanism(*(x[:, :, start:end] for x in (q, k, v)), causal=causal)
        torch.testing.assert_close(packed[:, :, start:end], alone)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_real_magnitudes(variant, dtype, causal):
    """Scores up to ±100, as real BERT layers have them: finite everywhere, and close to the definition in float64."""
    mechanism = build(variant, dtype=dtype)
    q, k, v = draw_qkv(100, dtype=torch.float32)
    largest = (q @ k.transpose(-1, -2) * D**-0.5).abs().max()
    q, k, v = (
        (x * s).to(dtype).requires_grad_() for x, s in zip((q, k, v), [(100 / largest) ** 0.5] * 2 + [1], strict=True)
    )
    key_mask = torch.arange(100)[None] < torch.tensor([[100], [60]])
    out = mechanism(q, k, v, key_mask=key_mask, causal=causal)
    assert out.dtype == dtype and torch.isfinite(out).all()
    leaves = [q, k, v, *mechanism.parameters()]
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.float().sum(), leaves, materialize_grads=True))
    if "tanh" in str(variant):
        return  # denominators near zero: no digits to compare
    exact = definition(mechanism.double(), *(x.detach().double() for x in (q, k, v)), key_mask=key_mask, causal=causal)
    error = (out.detach().double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-3, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("variant", [("rff", {}), ("linear", {"feature_map": "tanh"})], ids=["rff", "tanh"])
def test_signed_features_lose_no_digits_in_bfloat16(variant):
    """Sums whose terms cancel are float32: the output is off by its own rounding and no more."""
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in draw_qkv(100, dtype=torch.float32))
    with torch.no_grad():
        out = mechanism(q, k, v).double()
        exact = definition(mechanism.double(), *(x.double() for x in (q, k, v)))
    rounding = (exact.bfloat16().double() - exact).norm()
    assert (out - exact).norm() < 1.02 * rounding


@every_mechanism
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing_inside(variant, dtype):
    mechanism = build(variant, dtype=torch.float32)
    q, k, v = draw_qkv(70, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        inside = mechanism(q, k, v)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, mechanism(q, k, v))


@every_variant
def test_queries_of_the_last_positions(variant):
    """Fewer queries than keys: the last query stands at the last key, as with a cache of keys and values."""
    mechanism = build(variant)
    q, k, v = draw_qkv(90)
    whole = mechanism(q, k, v, causal=True)
    torch.testing.assert_close(mechanism(q[:, :, 70:], k, v, causal=True), whole[:, :, 70:])


@every_variant
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(
    "cuts",
    [[1] * 90, [90], [70] + [1] * 20, [3, 64, 1, 22], [1, 2, 87]],
    ids=["steps", "once", "prompt", "chunks", "late"],
)
def test_extending_a_state_equals_one_call(variant, cuts, masked):
    mechanism = build(variant, kv_heads=2)
    q, k, v = draw_qkv(90, kv_heads=2)
    key_mask = torch.rand(2, 90) > 0.3 if masked else None
    whole = mechanism(q, k, v, key_mask=key_mask, causal=True)
    state = mechanism.new_state(2, D, q.dtype, q.device)
    addresses = [x.data_ptr() for x in state.tensors()]
    size = sum(x.untyped_storage().nbytes() for x in state.tensors())
    start, outs = 0, []
    for length in cuts:
        part = slice(start, start + length)
        mask = None if key_mask is None else key_mask[:, part]
        outs.append(mechanism(*(x[:, :, part] for x in (q, k, v)), state=state, key_mask=mask).detach())
        start += length
    torch.testing.assert_close(torch.cat(outs, dim=2), whole)
    if not mechanism.holds_all_keys:
        assert addresses == [x.data_ptr() for x in state.tensors()]
        assert size == sum(x.untyped_storage().nbytes() for x in state.tensors())
    assert not any(x.requires_grad for x in state.tensors())


@every_variant
def test_extending_gives_gradients_to_the_new_tokens(variant):
    """From an empty state, one call in training equals plain causal attention, gradients too (GPT-2 caches in
    training).
    """
    mechanism = build(variant)
    leaves = [x.requires_grad_() for x in draw_qkv(70)] + list(mechanism.parameters())
    cotangent = torch.randn(2, 4, 70, D, dtype=torch.float64)
    for length in (70, 1):
        new = [x[:, :, :length] for x in leaves[:3]]
        state = mechanism.new_state(2, D, torch.float64, "cpu")
        outs = mechanism(*new, state=state), mechanism(*new, causal=True)
        torch.testing.assert_close(*outs)
        for a, b in zip(
            *(torch.autograd.grad(o, leaves, cotangent[:, :, :length], materialize_grads=True) for o in outs),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@every_mechanism
def test_cross_attention(variant):
    mechanism = build(variant)
    q, k, v = draw_qkv(20, k_length=33)
    if mechanism.handles_cross_attention:
        torch.testing.assert_close(mechanism(q, k, v), definition(mechanism, q, k, v))
    else:
        with pytest.raises(ValueError, match="band"):
            mechanism(q, k, v)


@every_mechanism
def test_draws_are_reproducible_and_private(variant):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    made = {"dtype": torch.float32}  # of draws: in another, the first one is rounded and differs from all others
    first, again = (build(variant, seed=5, layer_idx=2, **made) for _ in range(2))
    assert torch.equal(torch.rand(3), expected), "building a mechanism used the global generator"
    for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    before = {name: x.clone() for name, x in first.state_dict().items() if "projection" in name}
    others = [build(variant, seed=seed, layer_idx=layer, **made) for seed, layer in ((6, 2), (5, 3))]
    for other in (*others, redraw(first)):
        for name, x in before.items():
            assert not torch.equal(other.state_dict()[name], x)
    for name, x in redraw(again).state_dict().items():
        assert torch.equal(x, first.state_dict()[name]), "the second draw differs between two copies"


@every_mechanism
def test_training_and_eval_agree_and_eval_never_redraws(variant):
    mechanism = build(variant)
    q, k, v = draw_qkv(70)
    train, evaluate = mechanism.train()(q, k, v), mechanism.eval()(q, k, v)
    assert torch.equal(train, evaluate)
    assert torch.equal(mechanism(q, k, v), evaluate)


@every_variant
def test_threads_do_not_mix(variant):
    mechanism = build(variant, dtype=torch.float32)
    inputs = [draw_qkv(70, dtype=torch.float32) for _ in range(4)]
    expected = [mechanism(*x, causal=True) for x in inputs]
    results = [None] * 4

    def work(number):
        for _ in range(5):
            results[number] = mechanism(*inputs[number], causal=True)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for result, reference in zip(results, expected, strict=True):
        assert torch.equal(result, reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3, 5, D)}, "built for"),
        ({"k": torch.zeros(1, 4, 5, D + 1)}, "built for"),
        ({"v": torch.zeros(1, 4, 6, D)}, "k has 5 tokens but v has 6"),
        ({"key_mask": torch.ones(1, 6)}, "key_mask"),
        ({"segments": torch.ones(1, 6)}, "segments"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"q": torch.zeros(1, 4, 6, D), "causal": True}, "at least as many keys"),
    ],
)
def test_wrong_inputs_are_refused(changes, message):
    arguments = dict.fromkeys("qkv", torch.zeros(1, 4, 5, D)) | changes
    mechanism = build(("favor+", {}), dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        mechanism(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
