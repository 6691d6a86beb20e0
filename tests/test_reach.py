"""Every supported architecture: what is patched works, keeps its masks and is undone; the rest is refused."""

import contextlib

import pytest
import torch
from support.architectures import (
    REFUSED,
    SUPPORTED,
    build,
    make_inputs,
    mechanism_calls,
    outputs,
    tiny_config,
    token_streams,
    unpadded,
)
from support.models import mechanisms
from support.reach_table import END, START, with_table
from transformers import AutoModel

from hf_rfattn import patch_model, unpatch_model
from hf_rfattn.integration.discovery import find_attention
from hf_rfattn.ops import softmax_attention

MECHANISMS = {"favor+": {}, "fmm": {"bandwidth": 4, "normalizer": "separate", "global_tokens": 0}}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


def architectures(wanted=lambda tiny: True):
    """Parametrise over the supported architectures that are wanted."""
    return pytest.mark.parametrize("name", [name for name, tiny in SUPPORTED.items() if wanted(tiny)])


def patched(name, mechanism="favor+", **options):
    """A patched tiny model; layers that stay softmax because of a window are warned of, and nothing else is."""
    window = pytest.warns(UserWarning, match="sees a window") if SUPPORTED[name].windows else contextlib.nullcontext()
    with window:
        return patch_model(build(name), mechanism, seed=7, **MECHANISMS[mechanism], **options)


@architectures()
@every_mechanism
def test_patch_run_train_unpatch(name, mechanism):
    """The right modules get a mechanism and use it, gradients are finite, and unpatching leaves no trace."""
    tiny, model, inputs = SUPPORTED[name], build(name), make_inputs(name)
    keys, config = list(model.state_dict()), model.config.to_dict()
    with torch.no_grad():
        softmax = outputs(model, inputs)
    window = pytest.warns(UserWarning, match="sees a window") if tiny.windows else contextlib.nullcontext()
    with window:
        patch_model(model, mechanism, seed=7, **MECHANISMS[mechanism])

    sites = find_attention(model)
    held = mechanisms(model)
    assert len(held) == tiny.patched
    assert len(sites) == tiny.patched + tiny.cross + tiny.windows
    assert sum(site.cross for site in sites) == tiny.cross
    assert not any(site.cross and site.name in held for site in sites)

    with mechanism_calls(model) as calls:
        out = outputs(model, inputs)
    assert set(calls) == set(held)
    assert {k: v.shape for k, v in out.items()} == {k: v.shape for k, v in softmax.items()}
    assert all(v.isfinite().all() for v in out.values())
    assert any((v - softmax[k]).abs().max() > 1e-4 for k, v in out.items())

    sum(v.square().mean() for v in out.values()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in gradients.values())
    for module in held:  # through the mechanism to the weights of queries and keys, not only past it
        assert any(n.startswith(module) and g.abs().max() > 0 for n, g in gradients.items())

    unpatch_model(model)
    with torch.no_grad():
        again = outputs(model, inputs)
    assert all(torch.equal(again[k], v) for k, v in softmax.items())
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config


@architectures()
@pytest.mark.parametrize("padded", [True, False])
def test_masks_and_scale_are_those_of_softmax(name, padded):
    """Softmax in the mechanism's place, with the masks and the scale that it is given, is the original model.

    This one finds padding, causality, heads, scales and biases that get lost on the way, whatever they are called.
    """
    tiny, model, inputs = SUPPORTED[name], build(name), make_inputs(name)
    if not padded:
        inputs.pop("attention_mask", None)
    with torch.no_grad():
        original = outputs(model, inputs)
    model = patched(name, cross_attention=tiny.cross > 0)
    for mechanism in mechanisms(model).values():
        mechanism.register_forward_hook(
            lambda m, args, kwargs, out: softmax_attention(*args, **kwargs), with_kwargs=True
        )
    with torch.no_grad():
        replaced = outputs(model, inputs)
    for key, value in original.items():
        torch.testing.assert_close(replaced[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@architectures(lambda tiny: tiny.padding and (tiny.inputs.startswith("text") or tiny.inputs == "speech"))
def test_padding_changes_nothing(name):
    """A padded row gives, at its valid positions, what it gives alone."""
    model, inputs = patched(name, "fmm"), make_inputs(name)
    with torch.no_grad():
        together, alone = outputs(model, inputs), outputs(model, unpadded(inputs))
    compared = [key for key in alone if not key.startswith("logits")]  # those are between rows
    assert compared
    for key in compared:
        torch.testing.assert_close(together[key][1:2, : alone[key].shape[1]], alone[key], rtol=1e-4, atol=1e-4)


@architectures(lambda tiny: tiny.inputs not in ("image", "speech"))
def test_who_sees_the_last_token(name):
    """Changing the last token changes nothing before it in a decoder, and does in an encoder."""
    model, inputs = patched(name, "fmm"), make_inputs(name)
    inputs.pop("attention_mask", None)  # so that only the pattern, not padding, hides tokens
    for tokens, states, causal in token_streams(name):
        changed = {**inputs, tokens: inputs[tokens].clone()}
        changed[tokens][:, -1] = (inputs[tokens][:, -1] + 7) % 90 + 5
        with torch.no_grad():
            before, after = outputs(model, inputs)[states], outputs(model, changed)[states]
        difference = (after - before).abs().amax(dim=(0, 2))  # [L]
        assert difference[-1] > 1e-4
        if causal:
            assert difference[:-1].max() < 1e-5
        else:
            assert difference[:-1].min() > 1e-6


@architectures(lambda tiny: tiny.generates)
def test_going_on_from_a_cache(name):
    """Tokens given one by one, each with the cache of those before it, give what they give together."""
    model, inputs = patched(name, "fmm"), make_inputs(name)
    tokens = token_streams(name)[0][0]
    if tokens == "input_ids":
        inputs.pop("attention_mask")
    with torch.no_grad():
        together = model(**inputs).last_hidden_state
        first = inputs[tokens].shape[1] - 2
        step = model(**{**inputs, "use_cache": True, tokens: inputs[tokens][:, :first]})
        states = [step.last_hidden_state]
        for i in range(first, inputs[tokens].shape[1]):
            new = {**inputs, "use_cache": True, tokens: inputs[tokens][:, i : i + 1]}
            step = model(**new, past_key_values=step.past_key_values)
            states.append(step.last_hidden_state)
    torch.testing.assert_close(torch.cat(states, dim=1), together, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """An error that says why, and a model that is what it was."""
    model, reason = build(name), REFUSED[name][1]
    keys, config = list(model.state_dict()), model.config.to_dict()
    with pytest.raises(ValueError, match=reason):
        patch_model(model, "favor+")
    assert list(model.state_dict()) == keys
    assert model.config.to_dict() == config
    assert not any(hasattr(module, "rf") or module._forward_pre_hooks for module in model.modules())


def test_layers_of_different_sizes():
    """Sizes and windows are those of each layer; transformers raises when such a config is asked as a whole."""
    assert [site.head_dim for site in find_attention(build("gemma4_text"))] == [8, 16]
    heads = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_config("neomme", {**heads, "layer_types": ["full_attention", "sliding_attention"]})
    everything, window = find_attention(AutoModel.from_config(config))
    assert everything.refusal is None
    assert "window of 4 tokens" in window.refusal


def test_table_is_put_between_the_markers():
    assert with_table(f"a\n{START}\nold\n{END}\nb\n", "new") == f"a\n{START}\nnew\n{END}\nb\n"
    with pytest.raises(ValueError, match="no place"):
        with_table("a README without markers", "new")
