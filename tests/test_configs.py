"""Configs: JSON round trip, validation on construction, the registry."""

import dataclasses
import json

import pytest
import torch
from support.variants import every_variant

import hf_rfattn
from hf_rfattn import FavorConfig, FmmConfig, HedgehogConfig, LinearConfig, MechanismConfig, RffConfig, build_mechanism
from hf_rfattn.features import ConstantFeatures
from hf_rfattn.mechanisms import LinearMechanism, mechanism_names, register_mechanism, registry, resolve_config


@every_variant
def test_json_round_trip(variant):
    name, options = variant
    config = resolve_config(name, **options)
    document = json.loads(json.dumps(config.to_dict()))
    assert resolve_config(document) == config
    assert dataclasses.fields(config) is not None and hash(config) == hash(resolve_config(document))


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("favour+", {}, "did you mean 'favor\\+'"),
        ("softmaxx", {}, "known: average, band"),
        (3, {}, "a name, a config"),
        ("favor+", {"num_feature": 3}, "did you mean 'num_features'"),
        ("favor+", {"num_features": 0}, "between 1 and"),
        ("favor+", {"num_features": 2.5}, "an integer"),
        ("favor+", {"num_features": True}, "an integer"),
        ("favor+", {"num_features": "64"}, "an integer"),
        ("favor+", {"projection": "orthgonal"}, "'iid', 'orthogonal', 'hadamard'"),
        ("favor+", {"antithetic": 1}, "bool"),
        ("favor+", {"antithetic": True, "num_features": 7}, "odd"),
        ("favor+", {"kernel": "relu", "variance": "optimal"}, "needs kernel='softmax'"),
        ("favor+", {"redraw_interval": 0}, "between 1 and"),
        ("favor+", {"trainable": True, "redraw_interval": 5}, "redraw_interval cannot be combined"),
        ("favor+", {"trainable": True, "variance": "optimal"}, "variance='standard'"),
        ("favor+", {"trainable": True, "kernel": "relu"}, "kernel='softmax'"),
        ("hedgehog", {"num_features": 7}, "odd"),
        ("hedgehog", {"num_features": 0}, "between 2 and"),
        ("rff", {"num_features": 7}, "odd"),
        ("rff", {"kernel": "laplace", "projection": "orthogonal"}, "needs projection='iid'"),
        ("fmm", {"bandwidth": -1}, "between 0 and"),
        ("fmm", {"far": ()}, "use 'band'"),
        ("fmm", {"far": ("band",)}, "linear mechanisms"),
        ("fmm", {"far": ("elo",)}, "did you mean 'elu'"),
        ("fmm", {"far": "tanh", "normalizer": "joint"}, "positive feature maps"),
        ("fmm", {"normalizer": "both"}, "'separate', 'joint'"),
        ({"num_features": 3}, {}, "'mechanism'"),
    ],
)
def test_mistakes_say_what_is_possible(attention, options, message):
    with pytest.raises(ValueError, match=message):
        build_mechanism(attention, num_heads=2, head_dim=8, **options)


def test_odd_head_size_matters_only_where_features_come_in_pairs():
    with pytest.raises(ValueError, match=r"num_features=7 \(the head size\) is odd"):
        build_mechanism("rff", num_heads=1, head_dim=7)
    q = torch.randn(1, 1, 4, 7)
    for name in mechanism_names():
        options = {"num_features": 8} if name == "rff" else {}
        assert build_mechanism(name, num_heads=1, head_dim=7, **options)(q, q, q).shape == q.shape


def test_wrong_shapes_of_the_mechanism():
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        build_mechanism("favor+", num_heads=4, num_kv_heads=3, head_dim=8)
    with pytest.raises(ValueError, match="head_dim must be a positive"):
        build_mechanism("favor+", num_heads=4, head_dim=0)


def test_aliases_and_presets():
    assert resolve_config("performer") == resolve_config("FAVOR+") == FavorConfig()
    assert resolve_config("fmmformer") == FmmConfig()
    assert resolve_config("elu-") == LinearConfig(feature_map="elu-")
    assert FmmConfig(far="elu").far == ("elu",)
    assert FavorConfig().replace(num_features=3).num_features == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        RffConfig().num_features = 3


def test_third_party_mechanism_in_its_own_file(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))

    @dataclasses.dataclass(frozen=True)
    class ToyConfig(MechanismConfig):
        strength: float = 1.0

    class Toy(LinearMechanism):
        def __init__(self, config, **shape):
            super().__init__(config, ConstantFeatures(), **shape)

    with pytest.raises(ValueError, match="not registered"):
        build_mechanism(ToyConfig(), num_heads=1, head_dim=4)
    register_mechanism("toy", ToyConfig, Toy, aliases={"strong toy": {"strength": 9.0}})
    assert "toy" in mechanism_names()
    assert resolve_config("strong toy").strength == 9.0
    q = torch.randn(1, 1, 4, 4)
    assert build_mechanism("toy", num_heads=1, head_dim=4)(q, q, q).shape == q.shape
    assert FmmConfig(far=(ToyConfig(),)).to_dict()["far"] == [{"mechanism": "toy", "strength": 1.0}]
    with pytest.raises(ValueError, match="already registered"):
        register_mechanism("toy", HedgehogConfig, registry._REGISTRY["hedgehog"][1])
    with pytest.raises(ValueError, match="already registered"):
        register_mechanism("performer", ToyConfig, Toy)
    with pytest.raises(ValueError, match="frozen dataclass"):
        register_mechanism("other", dict, Toy)


def test_public_names_exist():
    for name in hf_rfattn.__all__:
        assert hasattr(hf_rfattn, name)
