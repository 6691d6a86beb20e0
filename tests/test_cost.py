"""Counts of multiply-adds and bytes: against formulas written out by hand, and as properties of every mechanism."""

import pytest
import torch
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2Model

from hf_rfattn import build_mechanism, mechanism_names
from hf_rfattn.integration.cost import attention_cost, crossover_length, is_causal
from hf_rfattn.integration.discovery import find_attention


def build(name, **options):
    return build_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=8, **options)


def test_softmax_counts_by_hand():
    cost = attention_cost(build("favor+"), 100, causal=True, dtype=torch.bfloat16)
    assert cost.softmax_multiply_adds == 4 * 2 * (100 * 101 // 2) * 8  # heads, scores and values, pairs, head size
    assert attention_cost(build("favor+"), 100, causal=False).softmax_multiply_adds == 4 * 2 * 100 * 100 * 8
    assert cost.softmax_memory == 2 * 100 * 2 * 8 * 2  # kv heads, tokens, key and value, head size, bytes


def test_state_by_hand():
    state = 16 * 8 + 16 + 16  # S, z, offsets
    cost = attention_cost(build("favor+", num_features=16), 100, causal=True, dtype=torch.bfloat16)
    assert cost.memory == 2 * state * 4  # kv heads, float32
    cost = attention_cost(build("band", bandwidth=10, global_tokens=0), 100, causal=True, dtype=torch.bfloat16)
    assert cost.memory == 2 * (11 * 2 * 8 * 4) + 11 + 8  # kv heads, keys and values in float32; flags; a count
    fmm = build("fmm", bandwidth=6, global_tokens=4, far=("elu", "elu-"))  # 16 features together
    near = 2 * ((7 + 4) * 2 * 8 * 4) + 7 + (4 + 1) * 8  # window and global tokens; flags; positions and a count
    assert attention_cost(fmm, 100, causal=True, dtype=torch.bfloat16).memory == 2 * state * 4 + near


@pytest.mark.parametrize("name", mechanism_names())
def test_state_does_not_grow_and_work_is_linear(name):
    mechanism = build(name)
    short, long, longer = (attention_cost(mechanism, length, causal=True) for length in (1000, 2000, 4000))
    if mechanism.holds_all_keys:
        assert long.memory > 1.9 * short.memory
        return
    assert short.memory == long.memory > 0
    assert longer.multiply_adds - long.multiply_adds == 2 * (long.multiply_adds - short.multiply_adds) > 0
    assert 3.9 < longer.softmax_multiply_adds / long.softmax_multiply_adds < 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", mechanism_names())
def test_crossover_is_the_first_length_with_fewer_multiply_adds(name, causal):
    mechanism = build(name)
    crossover = crossover_length([(mechanism, causal)])

    def lower(length):
        cost = attention_cost(mechanism, length, causal=causal)
        return cost.multiply_adds < cost.softmax_multiply_adds

    assert not any(lower(length) for length in range(1, crossover))
    assert all(lower(length) for length in range(crossover, crossover + 300))


def test_crossover_of_several_modules_lies_between_theirs():
    few, many = build("favor+", num_features=8), build("favor+", num_features=256)
    alone = [crossover_length([(m, False)]) for m in (few, many)]
    assert alone[0] < crossover_length([(few, False), (many, False)]) < alone[1]


def test_no_crossover(monkeypatch):
    mechanism = build("linear")
    monkeypatch.setattr(type(mechanism), "multiply_adds", lambda self, length, causal: 2 * length**2 * self.head_dim)
    assert crossover_length([(mechanism, False)]) is None


def test_which_modules_are_causal():
    tiny = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    bart = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    models = {
        "bert": BertModel(BertConfig(**tiny)),
        "bert decoder": BertModel(BertConfig(**tiny, is_decoder=True)),
        "gpt2": GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)),
        "bart": BartModel(BartConfig(**bart, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=9)),
    }
    found = {name: [is_causal(site) for site in find_attention(model)] for name, model in models.items()}
    assert found == {
        "bert": [False],
        "bert decoder": [True],
        "gpt2": [True],
        "bart": [False, True, False],  # encoder, decoder, cross-attention
    }
