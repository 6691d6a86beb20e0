"""Configs written by somebody who means harm: what they ask for is refused before anything is allocated or loaded."""

import json
import tracemalloc

import pytest
import torch
from support.models import tiny_bert
from transformers import AutoModel

from hf_rfattn import build_mechanism, patch_model
from hf_rfattn.integration.spec import PatchSpec

FAVOR = {"mechanism": "favor+"}
SPEC = {"format": 1, "seed": 0, "cross_attention": False, "softmax": "sdpa", "layers": {"0-1": FAVOR}}


@pytest.mark.parametrize(
    "name",
    [
        "someone/evil-kernel",
        "kernels-community/flash-attn2",
        "kernels-community/flash-attn2@main:forward",
        "paged|someone/evil-kernel",
        "hf_rfattn",
        "unknown",
        "",
    ],
)
def test_softmax_is_a_name_that_transformers_ships(name, tmp_path):
    patch_model(tiny_bert(), "favor+").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["rfattn"]["softmax"] = name
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"softmax implementation.*eager, sdpa"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"])
def test_plain_names_are_read(name):
    assert PatchSpec.from_dict({**SPEC, "softmax": name}).seed == 0


def read_layers(layers):
    return PatchSpec.from_dict({**SPEC, "layers": layers})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("favor+", {"num_features": 16_385}, "num_features must be between 1 and 16384"),
        ("rff", {"num_features": 10**12}, "num_features"),
        ("hedgehog", {"num_features": 2**40}, "num_features"),
        ("favor+", {"hadamard_blocks": 9, "projection": "hadamard"}, "hadamard_blocks"),
        ("rff", {"hadamard_blocks": 10**9}, "hadamard_blocks"),
        ("band", {"bandwidth": 16_385}, "bandwidth"),
        ("band", {"global_tokens": 1_025}, "global_tokens"),
        ("fmm", {"bandwidth": 10**9}, "bandwidth"),
        ("fmm", {"global_tokens": 10**9}, "global_tokens"),
        ("fmm", {"far": ["favor+"] * 33}, "far has 33 items; at most 32"),
        ("fmm", {"far": [{"mechanism": "favor+", "num_features": 10**9}]}, "num_features"),
        ("favor+", {"redraw_interval": 10**9}, "redraw_interval"),
    ],
)
def test_sizes_are_bounded(name, options, message):
    document = {"mechanism": name, **options}
    for read in (lambda: read_layers({"0-1": document}), lambda: build_mechanism(document, num_heads=2, head_dim=8)):
        with pytest.raises(ValueError, match=message):
            read()


def test_a_key_of_many_layers_takes_no_memory():
    """21 kB that once became 1.1 GB."""
    key = ",".join(["0-9999"] * 3_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 10000 layers"):
            read_layers({key: FAVOR})
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"mechanism": "fmm", "far": [inner]}])
def test_nesting_is_bounded(wrap):
    inner = "favor+"
    for _ in range(900):
        inner = wrap(inner)
    for layers in ({"0": {"mechanism": "fmm", "far": inner}}, {"0": inner}, inner):
        with pytest.raises(ValueError, match="nested"):
            read_layers(layers)


@pytest.mark.parametrize(
    "document",
    [
        {"mechanism": "favor+", "num_features": 16_384},
        {"mechanism": "favor+", "num_features": 16_384, "trainable": True},
        {"mechanism": "hedgehog", "num_features": 16_384},
        {"mechanism": "rff", "num_features": 16_384},
    ],
    ids=str,
)
def test_what_the_weights_do_not_have_is_never_drawn(document, tmp_path, monkeypatch):
    patch_model(tiny_bert(), document["mechanism"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rfattn"]["layers"] = {"0-1": document}
    path.write_text(json.dumps(config))
    monkeypatch.setattr(torch.linalg, "qr", lambda *a, **k: pytest.fail("a projection was drawn"))
    with pytest.raises(ValueError, match=r"mechanism tensors"):
        AutoModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_nesting_is_bounded_without_a_checkpoint():
    document = {"mechanism": "favor+"}
    for _ in range(5000):
        document = {"mechanism": "fmm", "far": [document]}
    with pytest.raises(ValueError, match="nested"):
        build_mechanism(document, num_heads=2, head_dim=8)
