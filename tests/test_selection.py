"""`patch_model(model, "auto", ...)`: the cheapest within the budget, softmax elsewhere, and why."""

import pytest
import torch
from support.conversion import make_batches
from support.models import MODELS, lively, tiny_bert
from transformers import AutoModel, BartConfig, BartModel

from hf_rfattn import BandConfig, attention_error, patch_model, unpatch_model
from hf_rfattn.integration.cost import attention_cost

LADDER = ("average", BandConfig(bandwidth=4), BandConfig(bandwidth=39))


@pytest.mark.parametrize("family", list(MODELS))
def test_each_layer_gets_the_cheapest_within_the_budget(family, tmp_path, capsys):
    """Errors are those of attention_error with the same mechanism everywhere."""
    model, batches = lively(MODELS[family]()), make_batches(2, length=40)
    with torch.no_grad():  # the second layer has little to attend to
        for name, parameter in model.named_parameters():
            if ("layer.1." in name or "h.1." in name or "layers.1." in name) and parameter.ndim > 1:
                parameter.mul_(0.05)
    errors = []
    for candidate in LADDER:
        errors.append(attention_error(patch_model(model, candidate), batches).overall)
        unpatch_model(model)
    budget = max(errors[0][1], errors[2][1]) * 1.01
    assert errors[2][0] < budget < errors[0][0]  # averaging does for the second layer alone
    patch_model(model, "auto", batches=batches, budget=budget, candidates=LADDER, length=200)
    said = capsys.readouterr().out
    cheapest = next(i for i in (1, 2) if errors[i][0] <= budget)
    kinds = {key: (doc["mechanism"], doc.get("bandwidth")) for key, doc in model.config.rfattn["layers"].items()}
    assert kinds == {"1": ("average", None), "0": ("band", LADDER[cheapest].bandwidth)}
    assert f"error {errors[cheapest][0]:.3f}" in said and f"error {errors[0][1]:.3f}" in said
    found = attention_error(model, batches)
    assert found.overall == pytest.approx([errors[cheapest][0], errors[0][1]], rel=1e-4)
    cost = attention_cost(model.get_submodule(found.layers[0]).rf, 200, causal=family != "bert")
    assert f"{cost.multiply_adds / cost.softmax_multiply_adds:.2f} × the work" in said
    if family == "bert":
        model.save_pretrained(tmp_path)
        assert AutoModel.from_pretrained(tmp_path).config.rfattn == model.config.rfattn


def test_softmax_where_nothing_is_close_or_cheap_enough(capsys):
    model, (batch,) = lively(tiny_bert()), make_batches(1, length=40)
    before = model(**batch).last_hidden_state
    assert patch_model(model, "auto", batches=batch, budget=1e-9, length=4000) is model
    assert "layer 0: softmax; the closest is" in capsys.readouterr().out
    patch_model(model, "auto", batches=batch, budget=10.0, candidates=["hedgehog"], length=8)
    assert capsys.readouterr().out.count("softmax; at this length it has the least to do") == 2
    assert torch.equal(model(**batch).last_hidden_state, before) and not hasattr(model.config, "rfattn")
    patch_model(model, "auto", batches=batch, budget=10.0, layers=[1], length=4000)
    assert list(model.config.rfattn["layers"]) == ["1"]


def test_layers_of_one_number_are_chosen_together():
    """Encoder and decoder of a sequence-to-sequence model; cross-attention stays softmax unless asked for."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "max_position_embeddings": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    model = lively(BartModel(BartConfig(**sizes)).eval())
    batch = {"input_ids": torch.randint(3, 50, (2, 20)), "decoder_input_ids": torch.randint(3, 50, (2, 9))}
    both = patch_model(model, "auto", batches=batch, budget=10.0, length=4000)
    assert list(both.config.rfattn["layers"]) == ["0"] and len(attention_error(both, batch).layers) == 2
    unpatch_model(model)
    patch_model(model, "auto", batches=batch, budget=10.0, length=4000, cross_attention=True)
    assert len(attention_error(model, batch).layers) == 3
    assert model.config.rfattn["layers"]["0"]["mechanism"] != "band"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give batches="),
        ({"batches": [], "budget": 0.1}, "reached no attention"),
        ({"budgett": 0.1}, "did you mean 'budget'"),
        ({"budget": 0.0}, "above 0"),
        ({"candidates": []}, "candidates is empty"),
        ({"candidates": ["favour"]}, "did you mean 'favor'"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(options, message):
    model, batches = tiny_bert(), make_batches(1)
    given = options if not options or "batches" in options else {"batches": batches, **options}
    with pytest.raises(ValueError, match=message):
        patch_model(model, "auto", **given)
    assert not hasattr(model.config, "rfattn") and not hasattr(model.encoder.layer[0].attention.self, "rf")


def test_a_patched_model_is_not_chosen_for():
    with pytest.raises(ValueError, match="unpatch_model"):
        patch_model(patch_model(tiny_bert(), "favor+"), "auto", batches=make_batches(1))
