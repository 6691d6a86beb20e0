"""Masks that callers give a patched model: what they hide, and what is refused."""

import pytest
import torch
from conftest import MODELS, hidden, tiny_bert

from hf_rfattn import patch_model

every_model = pytest.mark.parametrize("family", MODELS)


def ids(batch=2, length=12):
    return torch.randint(1, 50, (batch, length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", [-10_000.0, float("-inf"), "finfo"], ids=str)
def test_floating_masks_hide_keys(low, dtype):
    model, tokens = patch_model(tiny_bert(), "favor+"), ids()
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
        model(input_ids=ids(), attention_mask=mask, use_cache=False)


def test_floating_masks_that_are_a_bias_are_refused_by_compiled_models():
    model = patch_model(tiny_bert(num_hidden_layers=1), "average")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask, tokens = torch.zeros(2, 1, 1, 12), ids()
    mask[1, ..., 7:] = -10_000.0
    with torch.no_grad():
        torch.testing.assert_close(
            hidden(compiled, input_ids=tokens, attention_mask=mask),
            hidden(model, input_ids=tokens, attention_mask=mask),
        )
        mask[1, ..., 7:] = -1.0
        with pytest.raises(RuntimeError, match="cannot add a bias"):
            compiled(input_ids=tokens, attention_mask=mask)
