"""What is published names models, data and files, and does not say where they lie on the machine they come from."""

import json
import shutil
import sys
from pathlib import Path

import finetune_snli
import pytest
from support import sample
from support.documents import edit, make_checkpoint, measured_runs, write_results
from support.recipes import make_bert, make_gpt2, run_here
from typer.testing import CliRunner

from hf_rfattn.cli import app
from hf_rfattn.hub.cards import write_card
from hf_rfattn.hub.publish import publish
from hf_rfattn.results.documents import without_folders

QUICK = {"data": sample.folder("snli"), "max_train_samples": 32, "max_eval_samples": 9, "max_steps": 2, "batch_size": 8}
SECRET = "project-x"
NAME = "me/tiny"


def leaks(folder):
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """A working directory with everything in a folder whose name is nobody's business."""
    monkeypatch.chdir(tmp_path)
    make_bert(tmp_path / SECRET / "bert")
    (tmp_path / SECRET / "recipes").mkdir()
    return tmp_path


def command(monkeypatch, script, *words):
    monkeypatch.setattr(sys, "argv", [f"{SECRET}/recipes/{script}", *words])


def test_a_fine_tuned_model(inside, monkeypatch):
    words = ["--model", f"{SECRET}/bert", f"--output={SECRET}/out", "--tokenizer", f"./{SECRET}/bert"]
    command(monkeypatch, "finetune_snli.py", *words)
    result = run_here(
        finetune_snli.SnliTask, finetune_snli.ClassificationOptions,
        model=f"{SECRET}/bert", tokenizer=f"./{SECRET}/bert", attention="favor+",
        output=f"{SECRET}/out", **QUICK,
    )  # fmt: skip
    assert result["options"]["model"] == f"{SECRET}/bert"  # here, where the run can be made again
    model = inside / SECRET / "out" / "model"
    assert not leaks(model)
    card = (model / "README.md").read_text()
    assert "`python finetune_snli.py --model bert --output=out --tokenizer bert`" in card

    (model / "results" / "snli.json").unlink()
    done = CliRunner().invoke(app, ["card", str(model), "--results", f"{SECRET}/raw"])  # as the run has written it
    assert done.exit_code == 2 and "contains no result files" in done.output
    (inside / SECRET / "raw").mkdir()
    shutil.copy(inside / SECRET / "out" / "result.json", inside / SECRET / "raw")
    done = CliRunner().invoke(app, ["card", str(model), "--results", f"{SECRET}/raw"])
    assert done.exit_code == 0, done.output
    assert (model / "results" / "result.json").exists() and not leaks(model)


def test_a_converted_model(inside):
    import datasets

    folder = inside / SECRET / "texts"
    folder.mkdir()
    datasets.Dataset.from_list(sample.make("snli", "train")[:40]).to_parquet(folder / "train.parquet")
    options = ["--data", f"{SECRET}/texts", "--column", "premise", "--steps", "2", "--batch-size", "4"]
    done = CliRunner().invoke(app, ["convert", f"{SECRET}/bert", "hedgehog", *options, "-o", f"{SECRET}/out"])
    assert done.exit_code == 0, done.output
    model = inside / SECRET / "out"
    assert json.loads((model / "results" / "transfer.json").read_text())["dataset"]["name"] == "texts"
    assert not leaks(model)


def test_results_that_were_put_there_by_hand(tmp_path):
    make_checkpoint(tmp_path / "tiny")
    write_results(tmp_path / "tiny", measured_runs())
    write_card(tmp_path / "tiny", repo_id=NAME)
    assert publish(tmp_path / "tiny", NAME, dry_run=True)
    path = tmp_path / "tiny" / "results" / "favor.json"
    edit(path, lambda document: document.update(command=["python", f"{SECRET}/train.py", "--model", "google/bert"]))
    write_card(tmp_path / "tiny", repo_id=NAME)
    assert publish(tmp_path / "tiny", NAME, dry_run=True) and not leaks(tmp_path / "tiny")
    assert json.loads(path.read_text())["command"] == ["python", "train.py", "--model", "bert"]


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("../a/b/train.py", "train.py"), ("a/b", "b"), ("~/a/b/", "b"), ("/a/b", "b"), (r"C:\\a\\b", "b"),
        ("--data=/home/a=b/c", "--data=c"), ("far=/a/b", "far=b"), ("bandwidth=8", "bandwidth=8"), ("1e-3", "1e-3"),
        ("me/bert", "me/bert"), ("--model=me/bert", "--model=me/bert"), ("me/data", "me/data"),
        ("../", ".."), ("/", ""),
    ],
)  # fmt: skip
def test_words_of_a_command(word, left):
    document = {"model": "me/bert", "dataset": {"name": "me/data"}, "command": ["python", word], "options": {"x": word}}
    assert without_folders(document)["command"] == ["python", left]
    assert without_folders(document)["options"] == {"x": left}
    assert without_folders({**document, "command": f"python {word}"})["command"].endswith(left)


def test_benchmarks_and_studies(inside):
    make_gpt2(inside / SECRET / "gpt2")
    Path(SECRET, "text.txt").write_text("box : red ; cup : blue ; " * 20)
    for words in (
        ["bench", "decode", "--contexts", "8", "--attention", "favor+", "--repetitions", "2"],
        ["study", "rank", "--text-file", f"{SECRET}/text.txt", "--tokens", "16"],
    ):
        done = CliRunner().invoke(app, [*words, "--model", f"{SECRET}/gpt2", "--output", "results"])
        assert done.exit_code == 0, done.output
    documents = [json.loads(path.read_text()) for path in (inside / "results").glob("*.json")]
    assert [document["model"]["name"] for document in documents] == ["gpt2"] * 2
    assert not leaks(inside / "results")
