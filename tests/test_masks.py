"""Masks that callers give a patched model: what they hide, and what is refused."""

import pytest
import torch
from support.models import MODELS, hidden, ids, mechanisms, tiny_bert
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma3TextModel,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

from hf_rfattn import patch_model

every_model = pytest.mark.parametrize("family", MODELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", [-10_000.0, float("-inf"), "finfo"], ids=str)
def test_floating_masks_hide_keys(low, dtype):
    model, tokens = patch_model(tiny_bert(), "favor+"), ids(2, 12)
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[1, 7:] = 0
    low = torch.finfo(dtype).min if low == "finfo" else low
    mask = torch.zeros(2, 1, 1, 12, dtype=dtype).masked_fill(padding[:, None, None] == 0, low)
    expected = hidden(model, input_ids=tokens, attention_mask=padding)
    assert torch.equal(hidden(model, input_ids=tokens, attention_mask=mask), expected)


@every_model
@pytest.mark.parametrize("value", [-1.0, 2.0, -500.0, float("nan"), float("inf")])
def test_floating_masks_that_are_a_bias_are_refused(family, value):
    """They shift scores, which features cannot: neither hiding nor showing the key would be right."""
    model = patch_model(MODELS[family](), "favor+")
    mask = torch.zeros(2, 1, 1, 12)
    mask[0, ..., 3] = value
    with pytest.raises(NotImplementedError, match="cannot add a bias"):
        model(input_ids=ids(2, 12), attention_mask=mask, use_cache=False)


def test_floating_masks_that_are_a_bias_are_refused_by_compiled_models():
    model = patch_model(tiny_bert(num_hidden_layers=1), "average")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask, tokens = torch.zeros(2, 1, 1, 12), ids(2, 12)
    mask[1, ..., 7:] = -10_000.0
    with torch.no_grad():
        torch.testing.assert_close(
            hidden(compiled, input_ids=tokens, attention_mask=mask),
            hidden(model, input_ids=tokens, attention_mask=mask),
        )
        mask[1, ..., 7:] = -1.0
        with pytest.raises(RuntimeError, match="cannot add a bias"):
            compiled(input_ids=tokens, attention_mask=mask)


def vision_language_model(kind):
    text = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 50, "model_type": "gemma3_text" if kind == "gemma3" else "gemma",
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "image_size": 16, "patch_size": 8, "vision_use_head": False,
    }  # fmt: skip
    if kind == "gemma3":
        text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=49)
        return Gemma3ForConditionalGeneration(config).eval()
    config = PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, image_token_id=49)
    return PaliGemmaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind", ["gemma3", "paligemma"])
def test_language_models_whose_images_see_ahead_stay_softmax(kind):
    """Tokens of an image see each other in both directions; the vision tower is an ordinary encoder."""
    model = vision_language_model(kind)
    tokens = torch.tensor([[2, 49, 49, 49, 49, 7, 8]])
    inputs = {"input_ids": tokens, "token_type_ids": (tokens == 49).long(), "pixel_values": torch.randn(1, 3, 16, 16)}
    expected = model(**inputs).logits
    with pytest.warns(UserWarning, match="lets some tokens see later ones"):
        patch_model(model, "favor+", layers=[1])
    assert all("vision_tower" in name for name in mechanisms(model)) and len(mechanisms(model)) == 1
    with pytest.warns(UserWarning, match="stay softmax"):
        patch_model(model, "band", bandwidth=100)  # as wide as the image: softmax again
    assert len(mechanisms(model)) == 2 and all("vision_tower" in name for name in mechanisms(model))
    torch.testing.assert_close(model(**inputs).logits, expected)


def test_text_models_that_see_ahead_are_refused():
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 48,
        "vocab_size": 50, "layer_types": ["full_attention"],
    }  # fmt: skip
    patch_model(Gemma3TextModel(Gemma3TextConfig(**sizes)), "favor+")
    with pytest.raises(ValueError, match="lets some tokens see later ones"):
        patch_model(Gemma3TextModel(Gemma3TextConfig(**sizes, use_bidirectional_attention=True)), "favor+")
