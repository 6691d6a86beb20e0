"""torch.export of generation, by transformers' exporters: prefill and decoding steps, with either kind of cache."""

import copy

import pytest
import torch
from support.models import tiny_llama
from transformers import GenerationConfig
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_for_generation

from hf_rfattn import patch_model

LENGTH, BATCH = 8, 2
close = torch.testing.assert_close


def prompt(batch=BATCH, length=LENGTH, padding=3):
    tokens, mask = torch.randint(1, 50, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def settings(static):
    kind = {"cache_implementation": "static"} if static else {}
    return GenerationConfig(max_new_tokens=4, eos_token_id=None, pad_token_id=0, **kind)


@torch.no_grad()
def outputs(model, inputs):
    """Logits, and what the cache holds afterwards."""
    out = model(**copy.deepcopy(inputs))
    return out.logits, [t for layer in out.past_key_values.layers for t in layer.state.tensors()]


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("several", [False, True], ids=["one token", "several tokens"])
def test_export_for_generation(static, several):
    model = patch_model(tiny_llama(num_hidden_layers=1), "linear")
    arguments = {"generation_config": settings(static), "multi_token_decode": several}
    parts = decompose_for_generation(model, prompt(), **arguments)
    exported = DynamoExporter().export_for_generation(model, prompt(), config=DynamoConfig(), **arguments)
    assert set(exported) == {"prefill", "decode"}
    for name, (part, inputs) in parts.items():
        flags = {flag: inputs.pop(flag) for flag in ("use_cache", "return_dict") if flag in inputs}  # not exported
        close(outputs(exported[name].module(), inputs), outputs(part, inputs | flags))
    assert parts["decode"][1]["input_ids"].shape == (BATCH, 2 if several else 1)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2], ids=["one token", "several tokens"])
def test_an_exported_decoding_step_takes_any_length(tokens):
    """The number of tokens in a cache is a dimension of the exported program, and so is the batch."""
    model = patch_model(tiny_llama(num_hidden_layers=1), "linear")

    def step(batch, length, new=tokens):
        start = prompt(batch, length + new)
        cut = {name: value[:, :length] for name, value in start.items()}
        with torch.no_grad():
            cache = model(**cut, use_cache=True).past_key_values
        positions = torch.arange(length, length + new).expand(batch, -1)
        return {
            "input_ids": start["input_ids"][:, length:],
            "attention_mask": start["attention_mask"],
            "position_ids": positions,
            "past_key_values": cache,
        }

    exported = DynamoExporter().export(model, step(BATCH, LENGTH), DynamoConfig(dynamic=True)).module()
    for batch, length, new in ((2, 8, 2), (2, 5, 3), (3, 33, 9), (4, 100, 40)):
        inputs = step(batch, length, min(new, tokens) if tokens == 1 else new)
        close(outputs(exported, inputs), outputs(model, inputs))
