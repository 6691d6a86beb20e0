"""`hf-rfattn convert`: from files of text to a converted model; interrupted, on two processes, and what it refuses."""

import csv
import inspect
import json
import subprocess
import sys

import datasets
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import sample
from support.commands import failure, run
from support.recipes import environment, make_gpt2
from typer.testing import CliRunner

import hf_rfattn
from hf_rfattn.cli import app, converting
from hf_rfattn.cli.convert_model import convert
from hf_rfattn.cli.converting import read_texts
from hf_rfattn.conversion.transfer import Transfer
from hf_rfattn.results.schema import parse_result

PAIRS = [(row["premise"], row["hypothesis"]) for row in sample.make("snli", "train")[:60]]
QUICK = ("--steps", 12, "--rounds", 1, "--learning-rate", 0.05)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """One text per line, with blank lines between."""
    path = tmp_path_factory.mktemp("texts") / "lines.txt"
    path.write_text("\n\n".join(first for first, _ in PAIRS))
    return path


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_defaults_are_those_of_the_function():
    own, function = (inspect.signature(f).parameters for f in (convert, hf_rfattn.convert))
    for name in ("steps", "rounds", "exact_heads", "batch_size", "learning_rate"):
        assert own[name].default == function[name].default


def test_from_text_to_a_model_that_loads_as_it_was(bert, texts, tmp_path, monkeypatch):
    saved = []
    save = transformers.PreTrainedModel.save_pretrained

    def remember(self, *arguments, **options):
        saved.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", remember)
    out = run("convert", bert, "hedgehog", "--data", texts, "-o", tmp_path / "out", *QUICK)
    assert (
        "worst head" in out
        and "Mean error: " in out
        and " of 8 heads keep softmax" in out
        and f"recipes/finetune_text.py --model {tmp_path}" in out
    )
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")([PAIRS[0][0]], return_tensors="pt")
    assert torch.equal(loaded(**tokens)[0], saved[0].eval()(**tokens)[0])
    base, converted = load_file(f"{bert}/model.safetensors"), weights(tmp_path / "out")
    assert all(torch.equal(converted[name], value) for name, value in base.items()) and len(converted) > len(base)

    result = parse_result(json.loads((tmp_path / "out" / "results" / "transfer.json").read_text()))
    errors = result.errors
    assert all(a < b for a, b in zip(errors["after"]["overall"], errors["before"]["overall"], strict=True))
    assert result.transfer["steps"] == 12 and result.transfer["max_length"] == 64
    assert result.dataset["name"] == "lines" and result.document["command"].startswith("hf-rfattn convert bert")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Attention transfer" in card and f"{errors['after']['overall'][0]:.3g}"[:4] in card
    assert not (tmp_path / "out" / converting.STATE).exists()
    assert "exists already" in failure("convert", bert, "hedgehog", "--data", texts, "-o", tmp_path / "out")


def test_json(bert, texts, tmp_path):
    given = ("--layers", 1, "--exact-heads", 0, "--max-length", 16, "--bf16", "--base-model", "me/bert", "--json")
    result = json.loads(run("convert", bert, "favor+", "--data", texts, "-o", tmp_path / "out", *QUICK, *given))
    assert result["attention"]["layers"]["1"]["trainable"] is True and result["model"] == "me/bert"
    assert result["transfer"]["max_length"] == 16 and len(result["errors"]["after"]["layers"]) == 1
    assert "--bf16" in result["command"] and "--json" not in result["command"] and "-o" not in result["command"]


def test_projections_are_trained_unless_options_say_otherwise():
    def trainable(name, *options):
        return converting.make_trainable(hf_rfattn.parse_attention(name, options), list(options))

    assert trainable("favor+").trainable and not trainable("favor+", "trainable=false").trainable
    assert trainable("fmm").far[0].trainable and trainable("fmm", "far=elu").far[0].name == "linear"
    assert trainable("hedgehog") == hf_rfattn.HedgehogConfig()


def write_rows(path):
    rows = [{"a": first, "b": second, "label": 1} for first, second in PAIRS]
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_kinds_of_files(tmp_path, kind):
    rows, about = read_texts(str(write_rows(tmp_path / f"train.{kind}")), ["a", "b"], "train", None, 1000)
    assert rows == PAIRS and about["name"] == "train"
    assert about["fingerprint"] == read_texts(str(tmp_path), ["a", "b"], "train", None, 60)[1]["fingerprint"]
    (tmp_path / "test.txt").write_text("not read")
    assert read_texts(str(tmp_path), ["b"], "train", None, 5)[0] == [(second,) for _, second in PAIRS[:5]]
    assert read_texts(str(tmp_path), ["text"], "test", None, 5)[0] == [("not read",)]


def test_pairs(bert, tmp_path):
    given = ("--data", write_rows(tmp_path / "pairs.jsonl"), "--column", "a", "--column", "b", *QUICK)
    result = json.loads(run("convert", bert, "hedgehog", *given, "-o", tmp_path / "out", "--json"))
    assert result["transfer"]["steps"] == 12


def test_a_language_model_reads_blocks(tmp_path, monkeypatch):
    gpt2 = make_gpt2(tmp_path / "gpt2")
    (tmp_path / "stories.txt").write_text("\n".join(row["text"] for row in sample.make("wikitext", "train")[:400]))
    shapes = set()
    train = Transfer.train
    monkeypatch.setattr(
        Transfer, "train", lambda self, batch: shapes.add(batch["input_ids"].shape) or train(self, batch)
    )
    given = ("bandwidth=4", "far=hedgehog", "--data", tmp_path / "stories.txt", "--max-length", 32, *QUICK)
    out = run("convert", gpt2, "fmm", *given, "-o", tmp_path / "out")
    assert shapes == {(8, 32)} and "recipes/finetune_lm.py" in out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token is None  # as it was
    shapes.clear()
    run("convert", gpt2, "fmm", *given, "--no-join", "-o", tmp_path / "apart")
    assert {shape[0] for shape in shapes} == {8} and {shape[1] for shape in shapes} != {32}


def test_longer_than_the_positions_of_the_model(bert, texts, tmp_path):
    given = ("--data", texts, "-o", tmp_path / "out", "--max-length", 100, "--steps", 1)
    assert "--extend-positions tile" in run("convert", bert, "hedgehog", *given, code=2)
    run("convert", bert, "hedgehog", *given, "--extend-positions", "tile")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").max_position_embeddings == 100


def test_options_reach_the_function(bert, texts, tmp_path, monkeypatch):
    given = {}

    def remember(model, config, batches, **options):
        given.update(options, model=model)
        raise ValueError("enough")

    monkeypatch.setattr(hf_rfattn, "convert", remember)
    wanted = {"steps": 7, "rounds": 3, "exact_heads": 0.5, "learning_rate": 0.1, "seed": 5, "layers": "0-1"}
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--max-length", 100, "--extend-positions", "interpolate", "-o", tmp_path / "out"]
    assert "enough" in run("convert", bert, "hedgehog", "--data", texts, *words, code=2)
    expected = hf_rfattn.extend_positions(transformers.AutoModel.from_pretrained(bert), 100, "interpolate")
    assert same(given.pop("model").state_dict(), expected.state_dict())
    assert {name: given[name] for name in wanted} == wanted
    assert not (tmp_path / "out").exists()


def test_an_interrupted_conversion_resumes(bert, texts, tmp_path, monkeypatch):
    train = Transfer.train
    stop = {"at": 5}

    def breaks(self, batch):
        if self.step == stop["at"]:
            raise KeyboardInterrupt
        return train(self, batch)

    monkeypatch.setattr(Transfer, "train", breaks)
    monkeypatch.setattr(converting, "SAVE_EVERY", 2)
    words = ["convert", bert, "hedgehog", "--data", str(texts), *map(str, QUICK)]

    def interrupted(folder):
        done = CliRunner().invoke(app, [*words, "-o", str(folder)])
        assert done.exit_code == 130 and "Traceback" not in done.output
        return done.stderr.splitlines()[-1]

    assert interrupted(tmp_path / "torn") == "hf-rfattn: Interrupted. Run the same command again to resume."
    stop["at"] = 0
    assert interrupted(tmp_path / "early") == "hf-rfattn: Interrupted. Run the same command to start again."
    assert not (tmp_path / "early").exists()
    stop["at"] = None
    for option, message in {"--seed=1": "seed 0, not 1.", "--bf16": "bf16 False, not True."}.items():
        said = run(*words, option, "-o", tmp_path / "torn", code=2)
        assert f"holds an unfinished conversion with {message}" in said
    state = tmp_path / "torn" / converting.STATE / "conversion.pt"
    whole = state.read_bytes()
    state.write_bytes(whole[:-9])
    assert "conversion.pt is damaged" in run(*words, "-o", tmp_path / "torn", code=2)
    state.write_bytes(whole)
    run(*words, "-o", tmp_path / "torn")
    run(*words, "-o", tmp_path / "whole")
    assert same(weights(tmp_path / "torn"), weights(tmp_path / "whole"))
    assert not (tmp_path / "torn" / converting.STATE).exists()


@pytest.mark.slow
def test_on_two_processes(bert, texts, tmp_path):
    words = ["hf_rfattn", "convert", bert, "hedgehog", "--data", str(texts), *map(str, QUICK)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    run(*words[1:], "-o", tmp_path / "one")
    options = {"env": environment(), "capture_output": True, "text": True, "timeout": 170}
    done = subprocess.run([*launcher, *words, "-o", str(tmp_path / "two")], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mean error") == 1
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
    odd = subprocess.run([*launcher, *words, "-o", str(tmp_path / "odd"), "--batch-size", "3"], **options)
    assert odd.returncode and odd.stderr.count("must be a multiple of the 2 processes") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear"], "nothing to train"),
        (["favor+", "trainable=false"], "nothing to train"),
        (["softmax"], "Unknown attention 'softmax'"),
        (["hedgehog", "--layers", "9"], "no layer 9"),
        (["hedgehog", "--extend-positions", "tile"], "--extend-positions needs --max-length"),
        (["hedgehog", "--device", "abacus"], "The device 'abacus' is not available."),
        (["hedgehog", "--learning-rate", "0"], "learning_rate must be above 0, not 0.0."),
        (["hedgehog", "--batch-size", "60"], "has 60 texts; more than --batch-size 60 are needed"),
        (["hedgehog", "--join", "--max-length", "64", "--batch-size", "20"], "blocks of 64 tokens; more than"),
        (["hedgehog", "--column", "review"], "has no column 'review'; it has text. Choose one with --column."),
        (["hedgehog", "--column", "a", "--column", "b", "--column", "c"], "or twice for pairs"),
        (["hedgehog", "--join", "--column", "a", "--column", "b"], "--join works with one column"),
        (["hedgehog", "--data", "nowhere.txt"], "there is no file or folder 'nowhere.txt'"),
        (["hedgehog", "--data", "./nowhere"], "there is no file or folder './nowhere'"),
        (
            ["hedgehog", "--data", "me/nowhere"],
            "'me/nowhere', which is not a local file or folder, as a dataset on the Hub, cannot be read",
        ),
        (["hedgehog", "--data", "{folder}/empty"], "has no file in a supported format (.txt, .csv"),
        (["hedgehog", "--data", "{folder}/blank.txt"], "blank.txt contains no text."),
        (["hedgehog", "--data", "{folder}/text.pdf"], "unknown format '.pdf'; supported: .txt"),
        (["hedgehog", "--data", "{folder}/broken.jsonl"], "broken.jsonl cannot be read: "),
        (["hedgehog", "--data", "{folder}/list.json"], "row 0 must be an object"),
        (["hedgehog", "--data", "{folder}/number.jsonl"], "row 1 has 7 in the column 'text', not a text."),
        (["hedgehog", "--data", "{folder}/broken.parquet"], "broken.parquet cannot be read: "),
    ],
)
def test_what_it_refuses(bert, texts, tmp_path, words, message):
    folder = tmp_path / "data"
    (folder / "empty").mkdir(parents=True)
    for name, text in {
        "text.pdf": "", "blank.txt": " \n\n", "broken.jsonl": '{"text": ', "list.json": "[1]", "broken.parquet": "PAR1",
        "number.jsonl": '{"text": "a"}\n{"text": 7}\n',
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    said = run("convert", bert, *(["--data", texts] if "--data" not in words else []), "-o", tmp_path / "out", *(
        word.format(folder=folder) for word in words
    ), code=2)  # fmt: skip
    assert message in said.splitlines()[-1] and not (tmp_path / "out").exists()


def test_a_model_without_tokenizer(bert, texts, tmp_path):
    """transformers creates a tokenizer that knows special tokens only."""
    transformers.AutoModelForMaskedLM.from_pretrained(bert).save_pretrained(tmp_path / "bare")
    said = run("convert", tmp_path / "bare", "hedgehog", "--data", texts, "-o", tmp_path / "out", code=2)
    assert "has no tokenizer, which is needed to read text" in said.splitlines()[-1]


def test_folders_of_others_are_refused(bert, texts, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    said = failure("convert", bert, "hedgehog", "--data", texts, "-o", tmp_path)
    assert "is not an empty folder; choose another --output" in said
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
