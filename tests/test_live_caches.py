"""Caches in use: tied to the mechanism and the draw that filled them, to their batch, and to how they were made."""

import copy
import pickle

import pytest
import torch
from conftest import tiny_gpt2, tiny_llama
from transformers import DynamicCache, StaticCache

from hf_rfattn import calibrate, patch_model, redraw, unpatch_model

FAMILIES = {"gpt2": tiny_gpt2, "llama": tiny_llama}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_cache = pytest.mark.parametrize("kind", ["dynamic", "static"])

CHANGES = {
    "unpatched": unpatch_model,
    "switched to sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "switched to eager": lambda model: model.set_attn_implementation("eager"),
    "redrawn": redraw,
    "calibrated": lambda model: calibrate(model, {"input_ids": ids()}),
    "patched again": lambda model: patch_model(model, "favor+", variance="optimal"),
    "patched with another mechanism": lambda model: patch_model(model, "linear"),
    "patched in another layer": lambda model: patch_model(model, "favor+", layers=[1]),
}


def ids(batch=2, length=9):
    return torch.randint(1, 50, (batch, length))


def empty_cache(model, kind):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=64)


@torch.no_grad()
def forward(model, tokens, cache):
    return model(input_ids=tokens, past_key_values=cache, use_cache=True).logits


@every_family
@every_cache
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_is_of_no_use_to_a_changed_model(family, kind, change):
    model = patch_model(FAMILIES[family](), "favor+", variance="optimal")
    cache = empty_cache(model, kind)
    forward(model, ids(), cache)
    CHANGES[change](model)
    for used in (copy.deepcopy(cache), cache):
        with pytest.raises(ValueError, match="Start again without past_key_values"):
            forward(model, ids(length=1), used)
    forward(model, ids(length=1), empty_cache(model, kind))


@every_family
@every_cache
def test_a_cache_of_softmax_is_of_no_use_to_a_mechanism(family, kind):
    model = FAMILIES[family]()
    cache = empty_cache(model, kind)
    forward(model, ids(), cache)
    patch_model(model, "favor+")
    with pytest.raises(ValueError, match="Start again without past_key_values"):
        forward(model, ids(length=1), cache)


@every_cache
def test_a_cache_goes_on_after_softmax_in_between(kind):
    """Softmax on a cache of its own leaves the mechanisms as they are."""
    model = patch_model(tiny_llama(), "favor+")
    tokens, following = ids(), ids(length=1)
    cache, twin = empty_cache(model, kind), empty_cache(model, kind)
    forward(model, tokens, cache), forward(model, tokens, twin)
    expected = forward(model, following, twin)
    model.set_attn_implementation("sdpa")
    forward(model, ids(), empty_cache(model, kind))
    model.set_attn_implementation("hf_rfattn")
    assert torch.equal(forward(model, following, cache), expected)


@every_cache
def test_copied_pickled_and_reset_caches(kind):
    model = patch_model(tiny_llama(), "favor+")
    tokens, following = ids(), ids(length=1)
    cache = empty_cache(model, kind)
    forward(model, tokens, cache)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    expected = forward(model, following, cache)
    for twin in copies:
        assert torch.equal(forward(model, following, twin), expected)
    cache.reset()
    redraw(model)
    fresh = empty_cache(model, kind)
    assert torch.equal(forward(model, tokens, cache), forward(model, tokens, fresh))
