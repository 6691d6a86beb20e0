"""Everything runs offline, on one thread a worker, on models made here."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Some virtual machines announce AMX but kill a process that uses it; bf16 products then need another instruction set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tiny_bert(**changes):
    config = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=160, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(transformers.BertConfig(**config | changes)).eval()


def tiny_gpt2(**changes):
    config = dict(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=160, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config | changes)).eval()


def tiny_llama(**changes):
    """Grouped queries: four query heads share two key heads."""
    config = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=160, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes)).eval()


MODELS = {"bert": tiny_bert, "gpt2": tiny_gpt2, "llama": tiny_llama}


def hidden(model, **inputs):
    """The output every test compares: hidden states or logits `[B, L, E]`."""
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state
