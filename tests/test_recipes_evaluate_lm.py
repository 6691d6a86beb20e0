"""evaluate_lm.py: perplexity, speed and cache of a tiny decoder by context length."""

import json

import evaluate_lm
import pytest
import torch
import transformers
from datasets import Dataset
from support import sample
from support.recipes import forget_processes, make_gpt2
from training.messages import script
from training.session import in_session

import hf_rfattn

LENGTHS = [16, 32]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return make_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 200), ("test", 12)):
        Dataset.from_list(sample.make("wikitext", "train")[:count]).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def measure(model, data, output, **fields):
    given = {"lengths": LENGTHS, "new_tokens": 3, **fields}
    forget_processes()
    try:
        options = evaluate_lm.EvaluateOptions(model=model, data=data, output=str(output), **given)
        with script():
            return json.loads(in_session(options, "bench lm", evaluate_lm.evaluate).read_text())
    finally:
        forget_processes()


def by_place(result):
    return {(c["attention"], c["stage"], c["length"]): c for c in result["cells"]}


def test_every_attention_at_every_length(gpt2, texts, tmp_path, capsys):
    kinds = "softmax,hedgehog,linear"
    result = measure(gpt2, texts, tmp_path / "out", attention=kinds, transfer_steps=12, transfer_learning_rate=0.05)
    cells = by_place(result)
    stages = [("softmax", "before training"), ("hedgehog", "before training"), ("hedgehog", "after transfer")]
    stages.append(("linear", "before training"))  # has nothing to teach
    assert list(cells) == [(*stage, length) for stage in stages for length in LENGTHS]
    for cell in cells.values():
        assert cell["metrics"]["perplexity"]["n"] == result["tokens"] - 1  # each token once, whatever the length
        assert cell["prefill_tokens"] == cell["length"] - 3
        assert cell["prefill_tokens_per_second"] > 0 and cell["ms_per_token"] > 0
    error = result["transfer"]["hedgehog"]["error"]
    assert all(a < b for a, b in zip(error["after"], error["before"], strict=True))
    assert result["kind"] == "bench lm" and result["attention"]["softmax"] == "softmax"
    said = capsys.readouterr()
    table = evaluate_lm.table(result["cells"], "a title")
    assert [row[1] for row in table.rows[::2]] == ["softmax", "hedgehog", "linear"]
    assert all(row[2].endswith("(1.00 ×)") for row in table.rows[:2])
    assert "Perplexity" in said.out
    for length in LENGTHS:  # keys and values of two layers of size 64 in float32
        assert cells["softmax", "before training", length]["cache_bytes"] == 2 * 2 * 64 * length * 4
    constant = {cells["linear", "before training", length]["cache_bytes"] for length in LENGTHS}
    assert len(constant) == 1


def test_options_of_each_attention_and_either_measurement_alone(gpt2, texts, tmp_path):
    kinds = "softmax,band bandwidth=4,band bandwidth=8"
    speed = measure(gpt2, texts, tmp_path / "speed", attention=kinds, max_tokens=0, repetitions=1, dtype="bfloat16")
    assert {name: each["bandwidth"] for name, each in speed["attention"].items() if name != "softmax"} == {
        "band bandwidth=4": 4,
        "band bandwidth=8": 8,
    }
    assert speed["tokens"] == 0 and all(cell["metrics"] == {} and cell["ms_per_token"] > 0 for cell in speed["cells"])
    cells = by_place(speed)
    for length in LENGTHS:  # bfloat16: half of what float32 takes
        assert cells["softmax", "before training", length]["cache_bytes"] == 2 * 2 * 64 * length * 2
    score = measure(gpt2, texts, tmp_path / "score", attention=kinds, repetitions=0)
    assert all("ms_per_token" not in cell for cell in score["cells"])
    near, wide = (by_place(score)[f"band bandwidth={w}", "before training", 32]["metrics"] for w in (4, 8))
    assert near["perplexity"] != wide["perplexity"]


def test_perplexity_is_that_of_the_model(gpt2, texts, tmp_path):
    """Against the loss of the model itself, patched alike, on the same text."""
    cells = by_place(measure(gpt2, texts, tmp_path, attention="softmax,favor+", lengths=[40], max_tokens=40, seed=3))
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2).eval()
    words = transformers.AutoTokenizer.from_pretrained(gpt2)
    text = "".join(row["text"] for row in sample.make("wikitext", "train")[:12])
    ids = words(text, return_tensors="pt")["input_ids"][:, :40]
    for name in ("softmax", "favor+"):
        if name != "softmax":
            hf_rfattn.patch_model(model, name, seed=3)
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=ids).loss)
        assert cells[name, "before training", 40]["metrics"]["loss"]["value"] == pytest.approx(loss, rel=1e-4)


def test_beyond_the_positions_of_the_model(gpt2, texts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measure(gpt2, texts, tmp_path / "out", lengths=[80])
    assert "--max-length 80 exceeds the 64 positions" in capsys.readouterr().err
    result = measure(gpt2, texts, tmp_path / "out", lengths=[64, 80], extend_positions="tile")
    assert [cell["length"] for cell in result["cells"]] == [64, 80]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [60], "split": "train", "max_tokens": 60, "model": "./nowhere"}, "'./nowhere'"),
        ({"split": "dev"}, "split 'dev', cannot be read"),
        ({"text_column": "txt"}, "has no column 'txt'"),
        ({"transfer_steps": 2, "batch_size": 10**6, "attention": "hedgehog"}, "smaller --batch-size"),
    ],
)
def test_told_at_once(gpt2, texts, tmp_path, capsys, fields, message):
    given = {"model": gpt2, "data": texts, **fields}
    with pytest.raises(SystemExit) as stop:
        measure(given.pop("model"), given.pop("data"), tmp_path / "out", **given)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [8]}, "all must be larger than 17"),
        ({"attention": "softmax,favour"}, "Unknown attention 'favour'"),
        ({"max_length": 100}, "largest of --lengths"),
        ({"attention": "fmm,band", "attention_options": ["bandwidth=4"]}, "one mechanism only"),
        ({"save_every": 2}, "this recipe cannot resume"),
    ],
)
def test_options(fields, message):
    with pytest.raises(ValueError, match=message):
        evaluate_lm.EvaluateOptions(**{"model": "m", **fields})
