"""Caches in use: tied to the mechanism and the draw that filled them, to their batch, and to how they were made."""

import copy
import pickle

import pytest
import torch
from support.models import ids, tiny_gpt2, tiny_llama
from transformers import DynamicCache, StaticCache, WhisperConfig, WhisperForConditionalGeneration

from hf_rfattn import calibrate, patch_model, redraw, unpatch_model

FAMILIES = {"gpt2": tiny_gpt2, "llama": tiny_llama}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_cache = pytest.mark.parametrize("kind", ["dynamic", "static"])

CHANGES = {
    "unpatched": unpatch_model,
    "switched to sdpa": lambda model: model.set_attn_implementation("sdpa"),
    "switched to eager": lambda model: model.set_attn_implementation("eager"),
    "redrawn": redraw,
    "calibrated": lambda model: calibrate(model, {"input_ids": ids(2, 9)}),
    "patched again": lambda model: patch_model(model, "favor+", variance="optimal"),
    "patched with another mechanism": lambda model: patch_model(model, "linear"),
    "patched in another layer": lambda model: patch_model(model, "favor+", layers=[1]),
}


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
    forward(model, ids(2, 9), cache)
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
    forward(model, ids(2, 9), cache)
    patch_model(model, "favor+")
    with pytest.raises(ValueError, match="Start again without past_key_values"):
        forward(model, ids(length=1), cache)


@every_cache
def test_a_cache_goes_on_after_softmax_in_between(kind):
    """Softmax on a cache of its own leaves the mechanisms as they are."""
    model = patch_model(tiny_llama(), "favor+")
    tokens, following = ids(2, 9), ids(length=1)
    cache, twin = empty_cache(model, kind), empty_cache(model, kind)
    forward(model, tokens, cache), forward(model, tokens, twin)
    expected = forward(model, following, twin)
    model.set_attn_implementation("sdpa")
    forward(model, ids(2, 9), empty_cache(model, kind))
    model.set_attn_implementation("hf_rfattn")
    assert torch.equal(forward(model, following, cache), expected)


@every_cache
def test_copied_pickled_and_reset_caches(kind):
    model = patch_model(tiny_llama(), "favor+")
    tokens, following = ids(2, 9), ids(length=1)
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


@every_family
@every_cache
@pytest.mark.parametrize("change", [None, "reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_a_cache_made_in_inference_mode_goes_on_outside(family, kind, change):
    model = patch_model(FAMILIES[family](), "favor+")
    tokens = ids(3, 9)
    cache, expected = empty_cache(model, kind), empty_cache(model, kind)
    argument = {"batch_select_indices": torch.tensor([2, 0]), "batch_repeat_interleave": 2}
    with torch.inference_mode():
        forward(model, tokens, cache)
        if change is not None:
            getattr(cache, change)(argument.get(change, torch.tensor([2, 1, 0])))
    forward(model, tokens, expected)
    if change is not None:
        getattr(expected, change)(argument.get(change, torch.tensor([2, 1, 0])))
    for length in (1, 3):
        following = ids(cache.layers[0].batch_size, length)
        assert torch.equal(forward(model, following, cache), forward(model, following, expected))


@every_cache
def test_generate_from_a_cache_made_in_inference_mode(kind):
    model = patch_model(tiny_llama(), "fmm", bandwidth=3)
    tokens = ids(1, 9)
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    whole = model.generate(tokens, use_cache=False, **settings)
    cache = empty_cache(model, kind)
    with torch.inference_mode():
        forward(model, tokens[:, :-1], cache)
    assert torch.equal(model.generate(tokens, past_key_values=cache, **settings), whole)


@every_cache
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_models_make_the_cache_too(kind, mode):
    """fullgraph, from the first token of the prompt on."""
    model = patch_model(tiny_llama(num_hidden_layers=1), "linear")
    tokens, following = ids(2, 9), ids(length=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache, expected = empty_cache(model, kind), empty_cache(model, kind)
    forward(model, tokens, expected)
    with mode():
        compiled(input_ids=tokens, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(forward(model, following, cache), forward(model, following, expected))


WHISPER = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 64, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 2])
def test_whisper_returns_a_cache_that_cannot_be_continued(beams):
    """It copies keys and values, which a recurrent layer does not have, into a new cache."""
    model = patch_model(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)).eval(), "favor+")
    with torch.no_grad():
        [parameter.mul_(4) for parameter in model.parameters() if parameter.ndim > 1]  # not one token for ever
    sound, settings = torch.randn(2, 8, 128), {"max_new_tokens": 6, "num_beams": beams}
    expected = model.generate(sound, use_cache=False, **settings)
    result = model.generate(sound, return_dict_in_generate=True, **settings)
    assert torch.equal(result.sequences[:, 1:], expected) and len(expected.unique()) > 1
    following = {"decoder_input_ids": ids(length=1), "past_key_values": result.past_key_values}
    with pytest.raises(ValueError, match="as Whisper's generate returns it"):
        model(sound, **following)
    with pytest.raises(RuntimeError):
        unpatch_model(model)(sound, **following)


@every_family
@every_cache
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_cache_of_another_batch_size_is_refused(family, kind, batch):
    model = patch_model(FAMILIES[family](), "favor+")
    cache = empty_cache(model, kind)
    forward(model, ids(3, 9), cache)
    with pytest.raises(ValueError, match=rf"holds 3 sequences, but the input has {batch}"):
        forward(model, ids(batch, 1), cache)
