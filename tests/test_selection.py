"""`choose_attention`: what it gives each layer within a budget of error or of cost, and the reasons."""

import pytest
import torch
from support.conversion import make_batches
from support.models import MODELS, lively, tiny_bert
from support.word_tokenizers import tiny_tokenizer
from transformers import AutoModel, BartConfig, BartModel, ModernBertConfig, ModernBertModel

from hf_rfattn import BandConfig, attention_error, choose_attention, patch_model, unpatch_model
from hf_rfattn.integration.cost import attention_cost

LADDER = ("average", BandConfig(bandwidth=4), BandConfig(bandwidth=39))


def with_a_weak_layer(model):
    """The second layer has little to attend to."""
    with torch.no_grad():
        for name, parameter in lively(model).named_parameters():
            if ("layer.1." in name or "h.1." in name or "layers.1." in name) and parameter.ndim > 1:
                parameter.mul_(0.05)
    return model


def errors_of(model, batches):
    """By candidate and layer, as attention_error gives them with one mechanism everywhere."""
    found = []
    for candidate in LADDER:
        found.append(attention_error(patch_model(model, candidate), batches).overall)
        unpatch_model(model)
    return found


@pytest.mark.parametrize("family", list(MODELS))
def test_each_layer_gets_the_cheapest_within_the_error(family, tmp_path):
    model, batches = with_a_weak_layer(MODELS[family]()), make_batches(2, length=40)
    errors = errors_of(model, batches)
    budget = max(errors[0][1], errors[2][1]) * 1.01
    assert errors[2][0] < budget < errors[0][0]  # averaging does for the second layer alone
    before = {name: value.clone() for name, value in model.state_dict().items()}
    choice = choose_attention(model, batches, budget=budget, candidates=LADDER, length=200)
    assert not hasattr(model.config, "rfattn") and model.state_dict().keys() == before.keys()
    cheapest = next(i for i in (1, 2) if errors[i][0] <= budget)
    assert dict(choice) == {0: LADDER[cheapest], 1: choice.candidates[1][0].config}
    assert [c.error for c in choice.candidates[0]] == pytest.approx([e[0] for e in errors], rel=1e-4)
    found = attention_error(patch_model(model, choice), batches)
    assert found.overall == pytest.approx([errors[cheapest][0], errors[0][1]], rel=1e-4)
    cost = attention_cost(model.get_submodule(found.layers[0]).rf, 200, causal=family != "bert")
    assert choice.chosen[0].cost == cost.multiply_adds / cost.softmax_multiply_adds
    first = next(line for line in str(choice).splitlines() if line.split()[0] == "0")
    assert f"band bandwidth={LADDER[cheapest].bandwidth}  {errors[cheapest][0]:.3f}" in first
    assert "cheapest of" in first and "at 200 tokens" in str(choice)
    if family == "bert":
        model.save_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path).config.rfattn == model.config.rfattn


def test_a_budget_of_cost_is_spent_where_it_helps():
    """Enough for one wide band: the layer that needs it gets it, and the budget is kept."""
    model, batches = with_a_weak_layer(tiny_bert()), make_batches(2, length=40)
    errors = errors_of(model, batches)
    all_average = choose_attention(model, batches, limit="cost", budget=1.0, candidates=["average"], length=4000)
    assert set(dict(all_average).values()) == {"softmax"}  # a budget of 1 pays for softmax everywhere
    wide = choose_attention(model, batches, budget=10, candidates=LADDER[2:], length=200).cost
    budget = wide / 2 + 0.02
    choice = choose_attention(model, batches, limit="cost", budget=budget, candidates=LADDER, length=200)
    assert choice.cost <= budget
    assert choice[0] == LADDER[2] and choice[1] != LADDER[2]
    assert choice.chosen[0].error == pytest.approx(errors[2][0], rel=1e-4)
    limit = max(option.error for option in choice.chosen.values())
    assert all(f"within an error of {limit:.3g}" in reason for reason in choice.reasons.values())
    with pytest.raises(ValueError, match=r"even the cheapest candidates need .* than budget=0.001"):
        choose_attention(model, batches, limit="cost", budget=0.001, candidates=LADDER, length=200)


def test_softmax_where_nothing_is_close_or_cheap_enough():
    model, (batch,) = lively(tiny_bert()), make_batches(1, length=40)
    choice = choose_attention(model, batch, budget=1e-9, candidates=LADDER[1:2], length=4000)
    assert dict(choice) == {0: "softmax", 1: "softmax"} and choice.cost == 1
    assert choice.reasons[0].startswith("no candidate is within 1e-09; the closest is band bandwidth=4 (error")
    with pytest.raises(ValueError, match="No layer was chosen"):
        patch_model(model, choice)
    choice = choose_attention(model, batch, budget=10.0, candidates=["hedgehog"], length=8)
    assert set(choice.reasons.values()) == {"softmax is the cheapest at this length"}
    choice = choose_attention(model, batch, budget=10.0, layers=[1], length=4000)
    assert list(choice) == [1]
    assert list(patch_model(model, choice).config.rfattn["layers"]) == ["1"]


def test_texts_with_a_tokenizer():
    words = tiny_tokenizer()
    model = lively(tiny_bert(vocab_size=len(words)))
    texts = ["the good film the bad film", "the film"]
    choice = choose_attention(model, texts, words, budget=10.0, candidates=["average"])
    batch = words(texts, padding=True, return_tensors="pt")
    assert choice.length == batch["input_ids"].shape[1]
    expected = attention_error(patch_model(model, "average"), batch).overall
    assert [choice.candidates[layer][0].error for layer in choice] == pytest.approx(expected, rel=1e-4)


def test_layers_that_cannot_be_patched_say_why():
    """ModernBERT: layers 1 and 2 see a window."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    model = ModernBertModel(ModernBertConfig(**sizes, vocab_size=50, pad_token_id=0)).eval()
    (batch,) = make_batches(1)
    choice = choose_attention(model, batch, budget=10.0, length=4000)
    assert [choice[layer] == "softmax" for layer in range(4)] == [False, True, True, False]
    assert "it sees a window of" in choice.reasons[1] and choice.reasons[1] in str(choice)
    assert list(patch_model(model, choice).config.rfattn["layers"]) == ["0,3"]


def test_layers_of_one_number_are_chosen_together():
    """Encoder and decoder of a sequence-to-sequence model; cross-attention stays softmax unless asked for."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "max_position_embeddings": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    model = lively(BartModel(BartConfig(**sizes)).eval())
    batch = {"input_ids": torch.randint(3, 50, (2, 20)), "decoder_input_ids": torch.randint(3, 50, (2, 9))}
    patch_model(model, choose_attention(model, batch, budget=10.0, length=4000))
    error = attention_error(model, batch)
    assert list(model.config.rfattn["layers"]) == ["0"] and len(error.layers) == 2
    unpatch_model(model)
    both = choose_attention(model, batch, budget=10.0, length=4000, cross_attention=True)
    assert all(c.config.name not in ("band", "fmm") for c in both.candidates[0])
    assert len(attention_error(patch_model(model, both, cross_attention=True), batch).layers) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "reached no attention"),
        ({"batches": "a text"}, "give their tokenizer too"),
        ({"budget": 0.0}, "above 0"),
        ({"limit": "time"}, "choose one of error, cost"),
        ({"layers": [9]}, "no layer 9"),
        ({"candidates": []}, "candidates is empty"),
        ({"candidates": ["favour"]}, "did you mean 'favor'"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(options, message):
    model = tiny_bert()
    with pytest.raises(ValueError, match=message):
        choose_attention(model, **{"batches": make_batches(1), **options})
    assert not hasattr(model.config, "rfattn") and not hasattr(model.encoder.layer[0].attention.self, "rf")


def test_a_patched_model_is_not_chosen_for():
    with pytest.raises(ValueError, match="unpatch_model"):
        choose_attention(patch_model(tiny_bert(), "favor+"), make_batches(1))


def test_auto_is_no_attention():
    with pytest.raises(ValueError, match="Unknown attention 'auto'"):
        patch_model(tiny_bert(), "auto")
