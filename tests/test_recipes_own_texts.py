"""finetune_text.py: the user's own files, with the columns and labels that they have."""

import csv
import json

import finetune_text
import pytest
import training.run
import transformers
from datasets import ClassLabel, Dataset, Features, Value
from support import sample
from support.recipes import run_here

from hf_rfattn.results.schema import parse_result

TEXT = (finetune_text.OwnTextTask, finetune_text.TextOptions)
QUICK = {"max_steps": 3, "batch_size": 8, "attention": "favor+"}
MOODS = ("sad", "glad")


def rows_with(label, count=40):
    """Sentences of the sample data under a user's names; `label` makes the label from the number of the class."""
    return [{"review": row["sentence"], "mood": label(row["label"])} for row in sample.make("sst2", "train")[:count]]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def run(bert, data, output, **fields):
    given = {"text_column": "review", "label_column": "mood", "model": bert, **QUICK, **fields}
    return run_here(*TEXT, data=str(data), output=str(output), **given)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_names_as_labels(bert, tmp_path, suffix):
    """The saved model names the classes as the user does, whatever the format of the file."""
    write(tmp_path / f"reviews{suffix}", rows_with(MOODS.__getitem__))
    result = run(bert, tmp_path / f"reviews{suffix}", tmp_path / "out")
    parse_result(result)
    assert result["task"] == "reviews" and result["main_metric"] == "accuracy"
    assert {name: metric["n"] for name, metric in result["metrics"].items()} == {"accuracy": 4, "f1_macro": 4}
    assert result["budget"]["train_samples"] == 36  # a tenth of a single file is held out
    folder = tmp_path / "out" / "model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "glad", 1: "sad"} and model.config.problem_type == "single_label_classification"
    classify = transformers.pipeline("text-classification", model=model, tokenizer=str(folder))
    assert classify(rows_with(str)[0]["review"])[0]["label"] in MOODS


def test_pairs_with_a_split_of_their_own(bert, tmp_path):
    """The classes of a ClassLabel column keep their names, and their numbers in every split."""
    features = Features({"a": Value("string"), "b": Value("string"), "label": ClassLabel(names=["yes", "maybe", "no"])})
    for split in ("train", "test"):
        rows = [(r["premise"], r["hypothesis"], r["label"]) for r in sample.make("snli", "validation")[:30]]
        a, b, label = map(list, zip(*rows, strict=True))
        Dataset.from_dict({"a": a, "b": b, "label": label}, features).to_parquet(tmp_path / f"{split}.parquet")
    columns = {"text_column": "a", "text_pair_column": "b", "label_column": "label"}
    result = run(bert, tmp_path, tmp_path / "out", eval_split="test", **columns)
    assert result["metrics"]["accuracy"]["n"] == 30 and result["dataset"]["split"] == "test"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model")
    assert config.id2label == {0: "yes", 1: "maybe", 2: "no"}
    task = finetune_text.OwnTextTask(
        finetune_text.TextOptions(model=bert, data=str(tmp_path), eval_split="test", **columns)
    )
    assert set(task.prepare().train[0]["token_type_ids"]) == {0, 1}


@pytest.mark.parametrize(("label", "problem"), [(lambda c: c + 0.5, None), (lambda c: 3 * c, "regression")])
def test_regression(bert, tmp_path, label, problem):
    write(tmp_path / "train.csv", rows_with(label))
    write(tmp_path / "validation.csv", rows_with(label, 20))
    result = run(bert, tmp_path, tmp_path / "out", problem=problem)
    assert set(result["metrics"]) == {"pearson", "spearmanr", "mean_absolute_error"}
    error = result["metrics"]["mean_absolute_error"]
    assert error["lower_is_better"] and 0 < error["chance"] <= 1.5
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model")
    assert config.problem_type == "regression" and config.num_labels == 1


def test_numbers_as_classes(bert, tmp_path):
    """Floats are scores unless told otherwise; whole numbers need not begin at 0."""
    for label, problem, names in (
        (lambda c: c + 0.5, "classification", {0: "0.5", 1: "1.5"}),
        (lambda c: 9 + c, None, {0: "9", 1: "10"}),  # in their order, not that of their digits
    ):
        write(tmp_path / "all.csv", rows_with(label))
        run(bert, tmp_path / "all.csv", tmp_path / "out", problem=problem, overwrite=True, eval_share=0.2)
        assert transformers.AutoConfig.from_pretrained(tmp_path / "out" / "model").id2label == names


@pytest.mark.parametrize("method", ["tile", "interpolate"])
def test_texts_longer_than_the_model(bert, tmp_path, capsys, method):
    """The bert of the tests has 64 positions."""
    write(tmp_path / "long.csv", [{**row, "review": " ".join([row["review"]] * 20)} for row in rows_with(str)])
    said = refused(bert, tmp_path / "long.csv", tmp_path / "out", capsys, max_length=100)
    assert "--max-length 100 exceeds the 64 positions" in said and "--extend-positions tile" in said
    result = run(bert, tmp_path / "long.csv", tmp_path / "out", max_length=100, extend_positions=method)
    assert result["budget"]["max_length"] == 100
    folder = tmp_path / "out" / "model"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.max_position_embeddings == words.model_max_length == 100
    long = words(" ".join(["box"] * 300), truncation=True, return_tensors="pt")
    assert long["input_ids"].shape[1] == 100 and model(**long).logits.shape == (1, 2)


def refused(bert, data, output, capsys, **fields):
    """The one line that is said, before any step."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(training.run.Training, "_step", lambda self, batches: pytest.fail("it trained"))
        run(bert, data, output, **fields)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("train", "fields", "message"),
    [
        (lambda rows: rows, {"text_column": "txt"}, "has no column 'txt'; it has review, mood"),
        (lambda rows: rows, {"label_column": "y"}, "has no column 'y'; it has review, mood"),
        (lambda rows: [*rows, {"review": "", "mood": "sad"}], {}, "example 40 has None in the column 'review'"),
        (lambda rows: [*rows, {"review": " ", "mood": "sad"}], {}, "example 40 has ' ' in the column 'review'"),
        (lambda rows: [*rows, {"review": "a", "mood": ""}], {}, "example 40 has None in the column 'mood'"),
        (lambda rows: [{**row, "mood": "sad"} for row in rows], {}, "40 examples have 1 different labels"),
        (lambda rows: [{**row, "mood": f"m{i}"} for i, row in enumerate(rows)], {}, "have 40 different labels"),
        (lambda rows: rows, {"problem": "regression"}, "Failed to parse string: '"),
        (lambda rows: [{**row, "mood": "fair" if row["mood"] == "sad" else "poor"} for row in rows], {},
         "Invalid string class label"),
    ],
)  # fmt: skip
def test_told_before_training(bert, tmp_path, capsys, train, fields, message):
    rows = rows_with(MOODS.__getitem__)
    write(tmp_path / "data" / "train.csv", train(rows))
    write(tmp_path / "data" / "validation.csv", rows)
    said = refused(bert, tmp_path / "data", tmp_path / "out", capsys, **fields)
    assert message in said and "\n" not in said


def test_classes_that_only_evaluation_has(bert, tmp_path, capsys):
    rows = rows_with(MOODS.__getitem__)
    write(tmp_path / "data" / "train.csv", rows)
    write(tmp_path / "data" / "validation.csv", [*rows[:3], {"review": "a box .", "mood": "angry"}])
    said = refused(bert, tmp_path / "data", tmp_path / "out", capsys)
    assert "Invalid string class label angry" in said


def test_options():
    with pytest.raises(ValueError, match="--data is missing"):
        finetune_text.TextOptions(model="m")
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        finetune_text.TextOptions(model="m", data="d", eval_share=1.0)
    with pytest.raises(ValueError, match="give one of them"):
        finetune_text.TextOptions(model="m", data="d", eval_share=0.5, eval_split="test")
