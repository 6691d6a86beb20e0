"""Models that start without memory: built on the meta device, given memory with `to_empty`, then initialised."""

import copy

import pytest
import torch
from support.models import MODELS, hidden, ids, tiny_bert
from support.variants import every_mechanism, every_variant
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, BertConfig, BertForSequenceClassification, BertModel, PreTrainedModel

from hf_rfattn import build_mechanism, patch_model, redraw
from hf_rfattn.mechanisms import Mechanism


def mechanism_tensors(model):
    return {name: tensor for name, tensor in model.state_dict().items() if ".rf." in name}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def spoil(model):
    """Memory as `to_empty` may leave it."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -77)


@every_variant
@pytest.mark.parametrize("family", MODELS)
def test_meta_device_then_init_weights(family, variant):
    expected = patch_model(MODELS[family](), variant[0], **variant[1], seed=7)
    with torch.device("meta"):
        model = type(expected)(copy.deepcopy(expected.config))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    spoil(model)
    model.init_weights()
    assert_same_tensors(mechanism_tensors(model), mechanism_tensors(expected))
    assert torch.isfinite(hidden(model.eval(), input_ids=ids())).all()


def test_a_model_that_is_patched_on_the_meta_device():
    expected = patch_model(tiny_bert(), "fmm", seed=7)
    with torch.device("meta"):
        model = BertModel(expected.config.__class__.from_dict(tiny_bert().config.to_dict()))
    patch_model(model, "fmm", seed=7).to_empty(device="cpu")
    spoil(model)
    model.init_weights()
    assert_same_tensors(mechanism_tensors(model), mechanism_tensors(expected))


@every_mechanism
def test_fsdp_on_the_meta_device(variant):
    """Parameters are split before they have memory; one process has all of every split."""
    expected = patch_model(tiny_bert(), variant[0], seed=7)
    with torch.device("meta"):
        model = BertModel(copy.deepcopy(expected.config))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for part in (*model.encoder.layer, model):
            fully_shard(part)
        model.to_empty(device="cpu")
        spoil(model)
        model.init_weights()
        tensors = mechanism_tensors(model)
        whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in tensors.items()}
    finally:
        dist.destroy_process_group()
    assert_same_tensors(whole, mechanism_tensors(expected))


@every_variant
def test_reset_parameters(variant):
    """FSDP calls it on every module that has tensors of its own; each fills its own, and all of them the whole."""
    mechanism = build_mechanism(variant[0], num_heads=4, num_kv_heads=2, head_dim=8, seed=3, **variant[1])
    expected = copy.deepcopy(mechanism.state_dict())
    spoil(mechanism)
    for part in mechanism.modules():
        if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            part.reset_parameters()
    assert_same_tensors(mechanism.state_dict(), expected)


def test_a_redrawn_map_starts_again():
    mechanism = build_mechanism("favor+", num_heads=2, head_dim=8)
    expected = copy.deepcopy(mechanism.state_dict())
    redraw(mechanism)
    mechanism.feature_map.reset_parameters()
    assert_same_tensors(mechanism.state_dict(), expected)


class Wrapper(PreTrainedModel):
    """A model of somebody's own, around one that is loaded already."""

    config_class = BertConfig
    base_model_prefix = "bert"
    _supports_sdpa = True

    def __init__(self, config, bert):
        super().__init__(config)
        self.bert = bert
        self.head = nn.Linear(config.hidden_size, 2)
        self.post_init()


def test_values_that_are_there_are_not_initialised_again(tmp_path):
    model = patch_model(tiny_bert(), "hedgehog")
    with torch.no_grad():
        for tensor in mechanism_tensors(model).values():
            tensor.mul_(1.25)
    expected = {name: tensor.clone() for name, tensor in mechanism_tensors(model).items()}
    model.init_weights()
    assert_same_tensors(mechanism_tensors(model), expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    loaded.init_weights()
    assert_same_tensors(mechanism_tensors(loaded), expected)
    wrapped = Wrapper(tiny_bert().config, loaded)
    assert_same_tensors(mechanism_tensors(wrapped.bert), expected)


def test_no_map_is_drawn_twice(monkeypatch):
    config = patch_model(tiny_bert(), "hedgehog", num_features=6).config
    drawn = []
    for cls in {type(m) for m in build_mechanism("hedgehog", num_heads=1, head_dim=2).modules()} - {Mechanism}:
        if hasattr(cls, "reset_parameters"):
            original = cls.reset_parameters
            monkeypatch.setattr(cls, "reset_parameters", lambda self, f=original: (drawn.append(self), f(self))[1])
    model = BertForSequenceClassification(config)
    assert len(drawn) == len(set(map(id, drawn))) and len(mechanism_tensors(model)) == 8


def test_a_mechanism_that_cannot_start_again_says_so():
    model = patch_model(tiny_bert(), "linear")
    with torch.device("meta"):
        for m in model.modules():
            if isinstance(m, Mechanism):
                m.extra = nn.Parameter(torch.ones(2))
                m._is_hf_initialized = False
    model.to_empty(device="cpu")
    with pytest.raises(AttributeError, match=r"LinearAttention.*reset_parameters"):
        model.init_weights()
