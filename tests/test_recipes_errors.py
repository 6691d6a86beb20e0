"""What a user can get wrong is told at once, before training, in one line and with exit code 2."""

import json
import types

import finetune_glue
import finetune_lm
import finetune_snli
import pytest
import training.run
import transformers
from datasets import Dataset
from support import sample
from support.recipes import run_apart, run_here
from training.classification import ClassificationOptions
from training.messages import script

SNLI = (finetune_snli.SnliTask, ClassificationOptions)
QUICK = {"data": "sample", "max_train_samples": 32, "max_eval_samples": 9, "max_steps": 4, "batch_size": 8}


def refused(capsys, recipe, output, **fields):
    """What is said, in one line; nothing was written and no step was made."""
    capsys.readouterr()  # not what the test itself has caused
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(training.run.Training, "_step", lambda self, batches: pytest.fail("it trained"))
        run_here(*recipe, output=str(output), **fields)
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert not (output / "run.json").exists()
    return said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 65}, "--max-length 65 exceeds the 64 positions of this model. Choose at most 64, or "
         "extend the position table with --extend-positions tile"),
        ({"extend_positions": "tile"}, "--extend-positions needs --max-length"),
        ({"attention": "favour"}, "Unknown attention 'favour' (did you mean 'favor'"),
        ({"attention": "favor+", "attention_options": ["features=3"]}, "'favor+' has no option 'features'"),
        ({"attention": "favor+", "attention_options": ["num_features=many"]}, "num_features must be an integer"),
        ({"attention": "favor+", "layers": "0-7"}, "This model has no layer 2; its layers are 0-1"),
        ({"attention": "linear", "mechanism_learning_rate": 1.0}, "has no parameters"),
        ({"attention": "linear", "transfer_steps": 3}, "has no parameters to train"),
        ({"attention": "fmm", "transfer_steps": 3, "exact_heads": 0.1}, "--exact-heads needs a linear mechanism"),
        ({"attention": "hedgehog", "distill": "self"}, "has no head for this task"),
        ({"model": "./nowhere"}, "--model: './nowhere' cannot be loaded"),
        ({"model": None}, "--model is missing"),
        ({"tokenizer": "./nowhere"}, "--tokenizer: './nowhere' cannot be loaded"),
        ({"data": "./nowhere"}, "is not a folder or file, nor a name on the Hub"),
        ({"eval_split": "dev"}, "split 'dev', cannot be read: there is no file for this split, such as dev.parquet"),
        ({"accumulate": 3}, "--batch-size 8 must be a multiple of 3: 1 process(es) × 3 gradient accumulation step(s)"),
        ({"mixed_precision": "fp16"}, "--mixed-precision fp16 needs a GPU"),
        ({"report_to": "wandb"}, "--report-to wandb: the package is not installed"),
    ],
)  # fmt: skip
def test_told_before_training(bert, tmp_path, capsys, monkeypatch, fields, message):
    monkeypatch.setattr(
        "training.session.importlib", types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda _: None))
    )
    assert message in refused(capsys, SNLI, tmp_path / "out", **{"model": bert, **QUICK, **fields})


def test_a_model_without_tokenizer(bert, tmp_path, capsys):
    """transformers creates a tokenizer that knows special tokens only."""
    transformers.AutoModel.from_pretrained(bert).save_pretrained(tmp_path / "bare")
    said = refused(capsys, SNLI, tmp_path / "out", **{"model": str(tmp_path / "bare"), **QUICK})
    assert "bare has no tokenizer" in said


@pytest.mark.parametrize("recipe", ["finetune_lm.py", "evaluate_lm.py"])
def test_an_encoder_is_no_language_model(bert, tmp_path, recipe):
    """With a language modelling head, every token would see those to predict."""
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"text": "good film"}\n' * 99)
    lengths = ["--lengths", 20] if recipe == "evaluate_lm.py" else []
    done = run_apart(recipe, "--model", bert, "--data", tmp_path, "--output", tmp_path / "out", *lengths, check=False)
    assert done.returncode == 2 and "is an encoder (bert), and cannot generate. Choose a decoder." in done.stderr


def test_labels_outside_the_range(bert, tmp_path, capsys):
    rows = sample.make("snli", "validation")[:20]
    Dataset.from_list(rows).to_parquet(tmp_path / "validation.parquet")
    Dataset.from_list([*rows, {**rows[0], "label": 3}]).to_parquet(tmp_path / "train.parquet")
    fields = {"model": bert, **QUICK, "data": str(tmp_path)}
    said = refused(capsys, SNLI, tmp_path / "out", **fields)
    assert "Split train: example 20 has 3 in the column 'label', not a label from 0 to 2" in said


@pytest.mark.parametrize(
    ("recipe", "columns", "text"),
    [
        (SNLI, "premise,hypothesis,label", "a box .,,0"),
        ((finetune_lm.LanguageTask, finetune_lm.LanguageOptions), "number,text", "3,"),
    ],
)
def test_empty_cells(bert, tmp_path, capsys, recipe, columns, text):
    """Those of a CSV file are no texts; without this, tokenizers fail in the midst of the data."""
    whole = {"premise,hypothesis,label": "a box .,a cup .,1"}.get(columns, "3,a box .")
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text("\n".join([columns, whole, whole, text, whole, text]) + "\n")
    column = columns.split(",")[1]
    said = refused(capsys, recipe, tmp_path / "out", **{**QUICK, "model": bert, "data": str(tmp_path)})
    assert f"example 2 has None in the column {column!r}, not a text (2 rows in total)" in said
    numbers = "\n".join([columns, *["7,7,1"] * 4]) if recipe is SNLI else "\n".join([columns, *["1,2"] * 4])
    (tmp_path / "train.csv").write_text(numbers + "\n")
    said = refused(capsys, recipe, tmp_path / "out", **{**QUICK, "model": bert, "data": str(tmp_path)})
    assert "not a text" in said


def test_pairs_without_a_gold_label_are_left_out(bert, tmp_path):
    rows = sample.make("snli", "validation")[:40]
    for row in rows[::4]:
        row["label"] = -1
    for split in ("train", "validation"):
        Dataset.from_list(rows).to_parquet(tmp_path / f"{split}.parquet")
    fields = {**QUICK, "data": str(tmp_path), "max_eval_samples": None, "max_train_samples": None}
    result = run_here(*SNLI, model=bert, output=str(tmp_path / "out"), **fields)
    assert result["metrics"]["accuracy"]["n"] == 30 and result["budget"]["train_samples"] == 30


def test_files_that_cannot_be_read(bert, tmp_path, capsys):
    glue = (finetune_glue.GlueTask, finetune_glue.GlueOptions)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.parquet").write_bytes(b"nonsense")
    said = refused(capsys, glue, tmp_path / "out", **{"model": bert, **QUICK, "data": str(tmp_path / "mine")})
    assert "mine, split 'train', cannot be read" in said


@pytest.mark.slow
def test_the_command_line(tmp_path):
    done = run_apart("finetune_snli.py", "--modle", "x", check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.strip() == (
        "finetune_snli.py: Unknown option '--modle' (did you mean '--model'?). --help describes all options."
    )


def test_a_traceback_can_be_asked_for(capsys, monkeypatch):
    def wrong():
        with script():
            json.loads("{")

    with pytest.raises(SystemExit):
        wrong()
    assert "Expecting property name" in capsys.readouterr().err
    monkeypatch.setenv("HF_RFATTN_TRACEBACK", "1")
    with pytest.raises(json.JSONDecodeError):
        wrong()
