"""A patched model owns its config: models made from the same object, and the parts of a model, know what is theirs."""

import copy

import pytest
import torch
from support.architectures import build, make_inputs, outputs
from support.models import MODELS, hidden, mechanisms, tiny_llama
from transformers import AutoModel, BertConfig, BertForSequenceClassification, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from hf_rfattn import patch_model, redraw, unpatch_model

every_model = pytest.mark.parametrize("family", MODELS)
TINY = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)  # fmt: skip


def ids(length=12):
    return torch.randint(1, 50, (2, length))


@every_model
def test_models_of_one_config(family, tmp_path):
    first = MODELS[family]()
    config = first.config
    second = type(first)(config).eval()
    tokens, document = ids(), config.to_dict()
    softmax = [hidden(m, input_ids=tokens) for m in (first, second)]
    patch_model(first, "favor+")
    assert first.config.rfattn and config.to_dict() == document
    assert torch.equal(hidden(second, input_ids=tokens), softmax[1])
    second.save_pretrained(tmp_path)
    again = type(first).from_pretrained(tmp_path)
    assert not mechanisms(again) and torch.equal(hidden(again, input_ids=tokens), softmax[1])

    patch_model(second, "linear")
    patched = hidden(first, input_ids=tokens)
    unpatch_model(second)
    assert torch.equal(hidden(first, input_ids=tokens), patched)
    unpatch_model(first)
    assert torch.equal(hidden(first, input_ids=tokens), softmax[0])
    assert first.config.to_dict() == document and "rfattn" not in str(second.config)


@every_model
def test_models_of_one_patched_config(family):
    """What is made from the config of a patched model is patched, and each can be unpatched alone."""
    first = patch_model(MODELS[family](), "favor+")
    second = type(first)(first.config).eval()
    tokens = ids()
    patched = hidden(second, input_ids=tokens)
    unpatch_model(first)
    assert not hasattr(first.config, "rfattn") and second.config.rfattn
    assert torch.equal(hidden(second, input_ids=tokens), patched)


@every_model
@pytest.mark.parametrize("change", [lambda m: patch_model(m, "favor+"), unpatch_model], ids=["patch", "unpatch"])
def test_parts_of_a_model_share_its_config(family, change):
    model = patch_model(MODELS[family](), "average")
    shared = {n for n, m in model.named_modules() if getattr(m, "config", None) is model.config}
    change(model)
    assert shared == {n for n, m in model.named_modules() if getattr(m, "config", None) is model.config}
    model.config.anything = "changed"
    assert all(model.get_submodule(n).config.anything == "changed" for n in shared)


def test_configs_of_towers_stay_parts_of_the_whole():
    model = patch_model(build("clip"), "favor+")
    assert model.text_model.config is model.config.text_config
    assert model.vision_model.config is model.config.vision_config
    unpatch_model(model)
    assert model.text_model.config is model.config.text_config
    assert "rfattn" not in str(model.config.to_dict())


def test_patching_a_part_is_known_to_the_whole(tmp_path):
    model = build("clip")
    inputs = make_inputs("clip")
    patch_model(model.text_model, "favor+")
    assert model.config.text_config.rfattn and not hasattr(model.config.vision_config, "rfattn")
    with torch.no_grad():
        expected = outputs(model, inputs)
        model.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path)
        for name, value in outputs(again, inputs).items():
            torch.testing.assert_close(value, expected[name])

    classifier = BertForSequenceClassification(copy.deepcopy(TINY)).eval()
    patch_model(classifier.bert, "favor+")
    assert classifier.bert.config is classifier.config and classifier.config.rfattn
    unpatch_model(classifier.bert)
    assert classifier.bert.config is classifier.config and not hasattr(classifier.config, "rfattn")


@pytest.mark.parametrize("name", ["clip", "siglip", "bart", "whisper", "bert"])
def test_draws_after_a_reload_are_those_of_the_original(name, tmp_path):
    """Towers are restored one by one, and stacks that share a config together."""
    model = patch_model(build(name), "favor+")
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    for number in range(3):
        ours, theirs = (redraw(m).state_dict() if number else m.state_dict() for m in (model, again))
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items() if ".rf." in key)


def test_tensor_parallelism_is_refused():
    """Each process has some of the heads: q, k and v do not fit mechanisms, which have all of them."""
    config = copy.deepcopy(tiny_llama().config)
    config.distributed_config = DistributedConfig(tp_size=2)
    model = LlamaForCausalLM(config)
    with pytest.raises(NotImplementedError, match=r"tensor parallelism \(tp_size=2\)"):
        patch_model(model, "favor+")
    assert not any(hasattr(m, "rf") for m in model.modules())
    patched = copy.deepcopy(patch_model(tiny_llama(), "favor+").config)
    patched.distributed_config = config.distributed_config
    with pytest.raises(NotImplementedError, match=r"tensor parallelism \(tp_size=2\)"):
        LlamaForCausalLM(patched)
    patched.distributed_config = DistributedConfig(fsdp_size=2)
    assert len(mechanisms(LlamaForCausalLM(patched))) == 2
