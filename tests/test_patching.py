"""patch_model on models: every mechanism × bert-like, gpt2-like, llama-like (grouped queries)."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from support.models import MODELS, hidden, ids, mechanisms, tiny_bart, tiny_bert, tiny_gpt2, tiny_llama
from support.variants import every_mechanism
from transformers import BertModel

from hf_rfattn import (
    BandConfig,
    FavorConfig,
    FmmConfig,
    attention_error,
    convert,
    extend_positions,
    mechanism_names,
    patch_model,
    unpatch_model,
)

every_model = pytest.mark.parametrize("family", MODELS)


@every_model
@every_mechanism
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family, variant, side):
    """Outputs and gradients of a padded batch equal those of each row alone; padded tokens can be anything."""
    model = patch_model(MODELS[family](), variant[0]).double()
    lengths, longest = (80, 53, 1), 80
    rows = [ids(1, n) for n in lengths]
    pad = lambda x, value: torch.nn.functional.pad(  # noqa: E731
        x, (longest - x.shape[1], 0) if side == "left" else (0, longest - x.shape[1]), value=value
    )
    tokens = torch.cat([pad(r, 0) for r in rows])
    mask = torch.cat([pad(torch.ones_like(r), 0) for r in rows])
    positions = torch.cat([pad(torch.arange(r.shape[1])[None], 0) for r in rows])
    out = hidden(model, input_ids=tokens, attention_mask=mask, position_ids=positions)
    other = torch.where(mask == 0, torch.randint_like(tokens, 1, 50), tokens)
    assert torch.equal(
        out[mask == 1], hidden(model, input_ids=other, attention_mask=mask, position_ids=positions)[mask == 1]
    )
    for row, n in enumerate(lengths):
        alone = hidden(model, input_ids=rows[row], position_ids=torch.arange(n)[None])[0]
        torch.testing.assert_close(out[row][mask[row] == 1], alone)
    padded_grads = torch.autograd.grad(out[1][mask[1] == 1].square().sum(), list(model.parameters()), allow_unused=True)
    alone = hidden(model, input_ids=rows[1], position_ids=torch.arange(lengths[1])[None])
    alone_grads = torch.autograd.grad(alone.square().sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(padded_grads, alone_grads, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)


@every_model
@every_mechanism
def test_interior_padding_and_rows_with_nothing_visible(family, variant):
    model = patch_model(MODELS[family](), variant[0])
    tokens, mask = ids(3, 80), torch.ones(3, 80, dtype=torch.long)
    mask[0, 20:50] = 0
    mask[2] = 0
    out = hidden(model, input_ids=tokens, attention_mask=mask)
    assert torch.isfinite(out).all()
    other = torch.where(mask == 0, torch.randint_like(tokens, 1, 50), tokens)
    changed = hidden(model, input_ids=other, attention_mask=mask)
    assert torch.equal(out[mask == 1], changed[mask == 1])
    out.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@every_mechanism
def test_causality(family, variant):
    model = patch_model(MODELS[family](), variant[0])
    tokens = ids(2, 100)
    out = hidden(model, input_ids=tokens)
    changed = tokens.clone()
    changed[:, 60:] = ids(2, 40)
    after = hidden(model, input_ids=changed)
    torch.testing.assert_close(after[:, :60], out[:, :60], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after[:, 60:], out[:, 60:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@every_mechanism
def test_packed_rows_equal_separate_rows(family, variant):
    model = patch_model(MODELS[family](), variant[0]).double()
    lengths = (3, 70, 27)
    rows = [ids(1, n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = hidden(model, input_ids=torch.cat(rows, dim=1), position_ids=positions, use_cache=False)
    separate = torch.cat([hidden(model, input_ids=r, use_cache=False) for r in rows], dim=1)
    torch.testing.assert_close(packed, separate)


@every_model
@every_mechanism
def test_unpatching_restores_everything(family, variant):
    model = MODELS[family]()
    tokens, mask = ids(2, 140), torch.ones(2, 140, dtype=torch.long)
    mask[1, 130:] = 0
    state = {k: v.clone() for k, v in model.state_dict().items()}
    config = model.config.to_dict()
    before = hidden(model, input_ids=tokens, attention_mask=mask)
    implementation = model.config._attn_implementation
    assert patch_model(model, variant[0]) is model
    same = torch.allclose(before, hidden(model, input_ids=tokens, attention_mask=mask))
    assert not same or variant[0] == "multipole"  # which is softmax up to `exact_keys` tokens
    assert mechanisms(model)
    unpatch_model(model)
    assert torch.equal(before, hidden(model, input_ids=tokens, attention_mask=mask))
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.config.to_dict() == config and model.config._attn_implementation == implementation
    assert not any(m._forward_pre_hooks for m in model.modules())
    unpatch_model(model)  # a second time does nothing
    assert torch.equal(before, hidden(model, input_ids=tokens, attention_mask=mask))


@every_model
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_switching_the_implementation_is_really_softmax(family, implementation):
    model = MODELS[family]()
    model.set_attn_implementation(implementation)
    tokens = ids(2, 40)
    before = hidden(model, input_ids=tokens)
    patched = hidden(patch_model(model, "favor+"), input_ids=tokens)
    model.set_attn_implementation(implementation)
    assert torch.equal(before, hidden(model, input_ids=tokens))
    model.set_attn_implementation("hf_rfattn")
    assert torch.equal(patched, hidden(model, input_ids=tokens))
    assert unpatch_model(model).config._attn_implementation == implementation


@every_model
def test_partial_patching_keeps_exact_softmax_elsewhere(family):
    """A mechanism equal to softmax in layer 1 and ordinary softmax in layer 0: the whole model is the original."""
    model = MODELS[family]()
    tokens, mask = ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    exact = hidden(model, input_ids=tokens, attention_mask=mask)
    plain = hidden(model, input_ids=tokens)
    patch_model(model, "band", bandwidth=1000, layers=[1])
    assert len(mechanisms(model)) == 1 and next(iter(mechanisms(model))).split(".rf")[0].count("1") == 1
    out = hidden(model, input_ids=tokens, attention_mask=mask)
    torch.testing.assert_close(out[mask == 1], exact[mask == 1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden(model, input_ids=tokens), plain, rtol=1e-5, atol=1e-5)
    patch_model(model, "average", layers="1")
    assert not torch.allclose(hidden(model, input_ids=tokens), plain, atol=1e-4)


def test_softmax_layers_of_a_packed_row():
    model = tiny_llama()
    rows = [ids(1, 13), ids(1, 20)]
    positions = torch.cat([torch.arange(13), torch.arange(20)])[None]
    exact = hidden(model, input_ids=torch.cat(rows, 1), position_ids=positions, use_cache=False)
    patch_model(model, "band", bandwidth=1000, layers=[0])
    out = hidden(model, input_ids=torch.cat(rows, 1), position_ids=positions, use_cache=False)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)


def test_mappings_and_configs():
    model = tiny_bert(num_hidden_layers=4)
    patch_model(model, {"0-1": "favor+", range(2, 3): FmmConfig(bandwidth=3, far=("elu",)), 3: "softmax"})
    kinds = {int(n.split(".")[2]): m.config for n, m in mechanisms(model).items()}
    assert kinds == {0: FavorConfig(), 1: FavorConfig(), 2: FmmConfig(bandwidth=3, far=("elu",))}
    layers = model.config.rfattn["layers"]
    assert list(layers) == ["0-1", "2"] and layers["0-1"]["mechanism"] == "favor+"
    patch_model(model, FavorConfig(num_features=5), antithetic=False, layers="0,2-3")
    assert [int(n.split(".")[2]) for n in mechanisms(model)] == [0, 2, 3]
    assert all(m.config.num_features == 5 for m in mechanisms(model).values())


def test_patching_twice_replaces():
    model, fresh = tiny_bert(), tiny_bert()
    fresh.load_state_dict(model.state_dict())
    tokens = ids(1, 20)
    patch_model(patch_model(model, "fmm"), "favor+", seed=3)
    expected = hidden(patch_model(fresh, "favor+", seed=3), input_ids=tokens)
    assert torch.equal(hidden(model, input_ids=tokens), expected)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert model.config.to_dict() == fresh.config.to_dict()
    assert [len(m._forward_pre_hooks) for m in model.modules()] == [len(m._forward_pre_hooks) for m in fresh.modules()]


@pytest.mark.parametrize(
    ("attention", "keywords", "message"),
    [
        ("favour", {}, "did you mean"),
        ("favor+", {"nun_features": 3}, "did you mean 'num_features'"),
        ("favor+", {"layers": [7]}, "This model has no layer 7; its layers are 0-1"),
        ("favor+", {"layers": []}, "No layer was chosen"),
        ("favor+", {"layers": "first"}, "Cannot parse the layers"),
        ("favor+", {"layers": [True]}, "Cannot parse the layers"),
        ({0: "favor+"}, {"layers": [0]}, "cannot be combined with a mapping"),
        ({0: "favor+"}, {"num_features": 3}, "cannot be combined with a mapping"),
        ({0: "favor+", "0-1": "rff"}, {}, "given twice"),
        ({"0-1": "softmax"}, {}, "No layer was chosen"),
        ({"0-1": 3}, {}, "a name, a config"),
        ("rff", {"num_features": 3}, "odd"),
    ],
)
@pytest.mark.parametrize("already", [False, True], ids=["fresh", "patched"])
def test_a_bad_argument_leaves_the_model_untouched(attention, keywords, message, already):
    model = tiny_bert()
    if already:
        patch_model(model, "fmm", bandwidth=3)
    tokens = ids(1, 20)
    before, config = hidden(model, input_ids=tokens), copy.deepcopy(model.config.to_dict())
    keys, hooks = list(model.state_dict()), [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        patch_model(model, attention, **keywords)
    assert torch.equal(before, hidden(model, input_ids=tokens))
    assert config == model.config.to_dict() and keys == list(model.state_dict())
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]


def test_cross_attention_stays_softmax_unless_asked_for():
    tokens, targets = ids(2, 30), ids(2, 12)
    model = patch_model(tiny_bart(), "favor+")
    assert len(mechanisms(model)) == 4 and not any("encoder_attn" in name for name in mechanisms(model))
    half = hidden(model, input_ids=tokens, decoder_input_ids=targets)
    patch_model(model, "favor+", cross_attention=True)
    assert len(mechanisms(model)) == 6
    whole = hidden(model, input_ids=tokens, decoder_input_ids=targets)
    assert half.shape == whole.shape and not torch.allclose(half, whole)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[:, 20:] = 0
    masked = hidden(model, input_ids=tokens, attention_mask=mask, decoder_input_ids=targets)
    cut = hidden(model, input_ids=tokens[:, :20], decoder_input_ids=targets)
    torch.testing.assert_close(masked, cut, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="undefined in cross-attention"):
        patch_model(model, BandConfig(), cross_attention=True)
    # layers of the encoder and of the decoder draw different projections
    draws = [m.feature_map.projection for m in mechanisms(model).values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_global_rng_is_untouched():
    model = tiny_gpt2()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    patch_model(model, "favor+", projection="hadamard")
    assert torch.equal(torch.rand(2), expected)


def test_dtype_and_mode_follow_the_model():
    model = patch_model(tiny_gpt2().to(torch.bfloat16).train(), "favor+")
    for m in mechanisms(model).values():
        assert m.training and all(x.dtype == torch.bfloat16 for x in m.state_dict().values() if x.is_floating_point())


def test_models_without_patchable_attention_are_refused():
    with pytest.raises(ValueError, match="holds no transformers model"):
        patch_model(torch.nn.Linear(2, 2), "favor+")


@pytest.mark.parametrize("call", [patch_model, attention_error, extend_positions])
@pytest.mark.parametrize("name", ["google-bert/bert-base-uncased", Path("models") / "bert"], ids=["name", "path"])
def test_names_of_models_are_not_models(call, name):
    with pytest.raises(ValueError, match=rf"'{name}' is a name, not a model.*AutoModel\.from_pretrained\('{name}'\)"):
        call(name, 512 if call is extend_positions else "favor+")
    with pytest.raises(ValueError, match="NoneType holds no transformers model"):
        call(None, 512 if call is extend_positions else "favor+")


@pytest.mark.parametrize("attention", mechanism_names())
def test_mechanisms_that_need_training_warn_in_pretrained_models(attention, tmp_path):
    tiny_bert().save_pretrained(tmp_path / "softmax")
    needs = attention in ("favor+", "hedgehog", "linear", "rff", "taylor", "exact_heads")

    def warnings_of(make, *arguments, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = make(*arguments, **options)
        return made, [w for w in caught if "no better than averaging" in str(w.message)]

    model, warned = warnings_of(patch_model, BertModel.from_pretrained(tmp_path / "softmax"), attention)
    assert len(warned) == needs
    assert all(w.filename == __file__ and "hf_rfattn.convert" in str(w.message) for w in warned)
    model.save_pretrained(tmp_path / "patched")
    assert not warnings_of(BertModel.from_pretrained, tmp_path / "patched")[1]
    assert not warnings_of(patch_model, tiny_bert().eval(), attention)[1]  # random weights
    assert not warnings_of(patch_model, BertModel.from_pretrained(tmp_path / "softmax").train(), attention)[1]


def test_conversion_does_not_warn_of_missing_training(tmp_path):
    tiny_bert().save_pretrained(tmp_path)
    model, batches = BertModel.from_pretrained(tmp_path), [{"input_ids": torch.randint(1, 50, (2, 8))}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, "hedgehog", batches, steps=1, progress=False)
    with pytest.warns(UserWarning, match="Without training, hedgehog attention"):
        patch_model(unpatch_model(model), {0: "hedgehog", 1: "multipole"})
