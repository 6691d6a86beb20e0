"""`bench model` at toy size: what it measures and writes, and that model cards can show it. Nothing asserts a time."""

import json

import pytest
import torch
import transformers
from support.commands import failure, run
from support.documents import make_checkpoint
from support.models import tiny_gpt2

from hf_rfattn.bench import loading, model
from hf_rfattn.bench.loading import load_model, random_tokens, share_weights
from hf_rfattn.bench.settings import ModelSettings
from hf_rfattn.hub.cards import write_card
from hf_rfattn.mechanisms import resolve_config
from hf_rfattn.results.report import Image, Table
from hf_rfattn.results.schema import parse_result

QUICK = ("--lengths", "64,32", "--repetitions", 2, "--threads", 1)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    tiny_gpt2(attn_pdrop=0.1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def result(gpt2, tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "new"
    asked = ("--model", gpt2, "--base-model", "me/tiny", "--attention", "performer,hedgehog", "--attention", "fmm")
    text = run("bench", "model", *asked, "--batch", 2, *QUICK, "--output", output)
    return json.loads((output / "model_gpt2.json").read_text()) | {"text": text, "output": output}


def cells(document, attention):
    """Of inference."""
    return [c for c in document["cells"] if c["attention"] == attention and not c["training"]]


def test_a_result_is_complete(result):
    assert result["kind"] == "bench model" and result["hardware"]["threads"] == 1
    assert result["model"]["name"] == "me/tiny"
    assert result["model"]["layers"] == 2 and result["model"]["head_dim"] == 8
    assert result["settings"]["lengths"] == [32, 64] and result["settings"]["passes"] == [False, True]
    names = ["favor+", "hedgehog", "fmm"]
    assert result["attention"] == {name: resolve_config(name).to_dict() for name in names}
    found = {(c["attention"], c["training"], c["length"]) for c in result["cells"]}
    assert found == {(n, t, x) for n in ["softmax", *names] for t in (False, True) for x in (32, 64)}
    assert len(found) == len(result["cells"])
    for cell in result["cells"]:
        spread = cell["milliseconds"]
        assert 0 < spread["lower"] <= spread["median"] <= spread["upper"] and spread["count"] == 2
        assert cell["samples_per_second"] == pytest.approx(1000 * 2 / spread["median"], rel=1e-3)
        assert cell["speed_over_softmax"] == 1 or cell["attention"] != "softmax"
        assert cell["features"] == {"softmax": None, "favor+": 8, "hedgehog": 16, "fmm": 8}[cell["attention"]]
        assert cell["step_bytes"] is None or cell["step_bytes"] >= 0
    assert result["weights_bytes"] == 4 * result["model"]["parameters"]
    for text in ("inference", "training", "hedgehog", "break-even", "model_gpt2.json"):
        assert text in result["text"]


def test_tables_and_plot_need_the_document_alone(result):
    document = json.loads((result["output"] / "model_gpt2.json").read_text())
    table, image = model.report(document, "some_name")
    assert isinstance(table, Table) and len(table.rows) == 4 * 2 and len(table.headings) == 2 + 2 + 1
    assert {row[0] for row in table.rows} == {"inference", "training"}
    assert isinstance(image, Image) and image.name == "some_name.png"
    figure = image.draw()
    assert len(figure.axes) == 3 and figure.axes[1].get_xscale() == figure.axes[2].get_yscale() == "log"
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    softmax = cells(document, "softmax")
    assert list(lines["softmax"].get_ydata()) == [c["milliseconds"]["median"] for c in softmax]
    assert (result["output"] / "model_gpt2.png").read_bytes().startswith(b"\x89PNG")


def test_documents_for_cards(result):
    for name in result["attention"]:
        document = json.loads((result["output"] / f"speed_gpt2_{name}.json").read_text())
        found = parse_result(document)
        assert found.kind == "speed" and found.model == "me/tiny" and found.batch == 2
        assert found.attention == resolve_config(name).to_dict() and "checkpoint" not in document
        for timing in found.lengths:
            softmax, own = (
                next(c for c in cells(result, each) if c["length"] == timing["length"]) for each in ("softmax", name)
            )
            assert timing["softmax_seconds"] == pytest.approx(softmax["milliseconds"]["median"] / 1000, rel=1e-3)
            assert timing["patched_seconds"] == pytest.approx(own["milliseconds"]["median"] / 1000, rel=1e-3)
            if own["step_bytes"]:
                assert timing["patched_peak_bytes"] == result["weights_bytes"] + own["step_bytes"]


def test_a_patched_checkpoint_is_measured_as_it_was_saved(tmp_path):
    """Some layers only; the card of that folder then shows the speed."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, layers=[1])
    run("bench", "model", "--model", folder, "--base-model", "me/base", *QUICK, "--output", folder / "results")
    document = json.loads((folder / "results" / "speed_bert_as_saved.json").read_text())
    (layers,) = document["attention"]["layers"].items()
    assert layers[0] == "1" and layers[1]["mechanism"] == "favor+" and layers[1]["num_features"] == 16
    card = write_card(folder).read_text()
    assert "| 32 | " in card and "| 64 | " in card and "No speed by length" not in card and "me/base" in card
    assert "No speed by length" in write_card_without_results(folder)


def write_card_without_results(folder):
    for path in (folder / "results").glob("*"):
        path.unlink()
    return write_card(folder).read_text()


def test_models_hold_the_same_weights_and_all_of_them_learn(gpt2):
    softmax = load_model(str(gpt2), 32, dtype="float32", device="cpu")
    assert softmax.config._attn_implementation == "sdpa" and softmax.config.attn_pdrop == 0
    models = share_weights(softmax, {"hedgehog": resolve_config("hedgehog")}, 0)
    optimizers = model._optimizers(models)
    assert len(optimizers["softmax"]) == 1 and optimizers["hedgehog"][0] is optimizers["softmax"][0]
    learned = models["hedgehog"].transformer.h[0].attn.rf.feature_map.query_weight
    shared = softmax.transformer.h[0].attn.c_attn.weight
    assert models["hedgehog"].transformer.h[0].attn.c_attn.weight is shared
    before = learned.clone(), shared.clone()
    model._train(models["hedgehog"], optimizers["hedgehog"], random_tokens(softmax, 2, 32, 0))
    for old, new in zip(before, (learned, shared), strict=True):
        assert 0 < (new - old).abs().max() < 1e-4
    assert learned.grad is None and shared.grad is None


def test_random_weights(monkeypatch, tmp_path):
    small = dict(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)

    def tiny_bert(length):
        config = transformers.BertConfig(**small, max_position_embeddings=length, attention_probs_dropout_prob=0.0)
        return transformers.BertForSequenceClassification(config)

    monkeypatch.setitem(loading.SHAPES, "bert", tiny_bert)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    run(
        "bench",
        "model",
        "--model",
        "bert",
        "--passes",
        "forward",
        *QUICK,
        "--output",
        tmp_path,
    )
    assert torch.equal(torch.rand(1), expected)
    found = json.loads((tmp_path / "model_bert.json").read_text())
    assert (
        found["model"]["name"]
        == found["settings"]["model"] + "-shaped, random weights"
        == "bert-shaped, random weights"
    )
    assert list(found["attention"]) == ["favor+"]
    assert [path.name for path in tmp_path.glob("speed_*")] == ["speed_bert_favor+.json"]


def test_shapes_are_those_of_bert_base_and_gpt2(monkeypatch):
    counts = {}
    for name, make in loading.SHAPES.items():
        with torch.device("meta"):
            made = make(128)
        counts[name] = made.num_parameters() / 1e6
        assert made.config.num_attention_heads == 12 and made.config.num_hidden_layers == 12
    assert 109 < counts["bert"] < 110 and 123 < counts["gpt2"] < 125  # with 128 positions


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--lengths", "161"), "This gpt2 model has 160 positions, too few for 161 tokens; choose shorter inputs."),
        (("--attention", "favr"), "Unknown attention 'favr'"),
        (("--passes", "dreaming"), "--passes: unknown value 'dreaming'; choose from forward, training."),
        (("--model", "/there/is/none"), "There is no folder '/there/is/none'."),
    ],
)
def test_mistakes(gpt2, tmp_path, arguments, message):
    given = ("--model", gpt2) if "--model" not in arguments else ()
    assert message in failure("bench", "model", *given, "--output", tmp_path / "none", *arguments)
    assert not (tmp_path / "none").exists()


def test_models_without_tokens_are_refused(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ViTModel takes pixel_values; bench model supports text only"):
        model.measure(ModelSettings(lengths=[32], model=str(tmp_path)))
