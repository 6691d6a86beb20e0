"""Quantised models: patched after quantisation, quantised after patching, saved, and trained with LoRA."""

import copy
import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from support.models import hidden, ids, mechanisms, tiny_bert, tiny_llama
from support.variants import every_mechanism
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rfattn import patch_model, unpatch_model

bits = pytest.mark.parametrize("bits", [4, 8])
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")


@pytest.fixture
def folder(tmp_path):
    """A model whose sizes bitsandbytes can pack on CPU."""
    tiny_llama(hidden_size=64, intermediate_size=64, vocab_size=64).save_pretrained(tmp_path)
    return tmp_path


def load(path, bits):
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config)


@every_mechanism
def test_dynamic_quantisation_before_and_after_patching(variant):
    model, tokens = tiny_bert(), ids(2, 9)
    linear = {torch.nn.Linear}
    patched_first = torch.ao.quantization.quantize_dynamic(patch_model(copy.deepcopy(model), variant[0]), linear)
    quantised_first = torch.ao.quantization.quantize_dynamic(model, linear)
    softmax = hidden(quantised_first, input_ids=tokens)
    patch_model(quantised_first, variant[0])
    assert len(mechanisms(quantised_first)) == 2
    torch.testing.assert_close(hidden(quantised_first, input_ids=tokens), hidden(patched_first, input_ids=tokens))
    assert torch.equal(hidden(unpatch_model(quantised_first), input_ids=tokens), softmax)


def test_mechanisms_have_the_dtype_of_what_is_not_quantised():
    model = torch.ao.quantization.quantize_dynamic(tiny_bert(), {torch.nn.Linear})
    model.embeddings.to(torch.bfloat16)
    patch_model(model, "hedgehog")
    assert {p.dtype for m in mechanisms(model).values() for p in m.parameters()} == {torch.bfloat16}


@needs_bitsandbytes
@every_mechanism
@bits
def test_bitsandbytes_before_and_after_patching(bits, variant, folder):
    model, tokens = load(folder, bits), ids(2, 9)
    softmax = hidden(model, input_ids=tokens)
    patch_model(model, variant[0])
    assert len(mechanisms(model)) == 2
    out = hidden(model, input_ids=tokens)
    assert torch.isfinite(out).all()

    patch_model(AutoModelForCausalLM.from_pretrained(folder), variant[0]).save_pretrained(folder / "patched")
    again = load(folder / "patched", bits)
    assert torch.equal(hidden(again, input_ids=tokens), out)
    assert "bit" in type(again.model.layers[0].self_attn.q_proj).__name__

    model.save_pretrained(folder / "quantised")
    assert torch.equal(hidden(AutoModelForCausalLM.from_pretrained(folder / "quantised"), input_ids=tokens), out)
    assert torch.equal(hidden(unpatch_model(model), input_ids=tokens), softmax)


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["hedgehog", "fmm"])
@bits
def test_lora_on_quantised_weights(bits, name, folder):
    """QLoRA: adapters and mechanisms learn, quantised weights stay."""
    model = prepare_model_for_kbit_training(patch_model(load(folder, bits), name))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["rf"]))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert any("lora" in n for n in trained) and any(".rf." in n for n in trained)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    tokens, losses = ids(2, 9), []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == set(trained)
