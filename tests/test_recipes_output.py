"""The output folder: what a run may use, what it refuses, and that it deletes nothing that a run has not written."""

import json
import shutil

import finetune_snli
import pytest
from support.recipes import run_here
from training.classification import ClassificationOptions

SNLI = (finetune_snli.SnliTask, ClassificationOptions)
QUICK = {"data": "sample", "max_train_samples": 32, "max_eval_samples": 9, "max_steps": 2, "batch_size": 8}


def listing(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, recipe=SNLI, **fields):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_here(*recipe, **{**QUICK, **fields})
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in said
    return said


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_folders_of_others_are_refused(bert, tmp_path, capsys, how):
    """Among them the input model itself, which earlier versions replaced."""
    for name in ("model", "state", "transfer", "best"):
        shutil.copytree(bert, tmp_path / name)
    before = listing(tmp_path)
    said = refused(capsys, model=str(tmp_path / "model"), output=str(tmp_path), **how)
    assert f"--model {tmp_path / 'model'} is inside --output" in said
    assert "is not empty and was not written by a recipe" in refused(capsys, model=bert, output=str(tmp_path), **how)
    assert listing(tmp_path) == before


def test_inputs_inside_a_finished_run(bert, tmp_path, capsys):
    """`--overwrite` would delete the model that the new run begins with, also through a link."""
    run_here(*SNLI, model=bert, attention="favor+", output=str(tmp_path / "out"), **QUICK)
    before = listing(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out" / "model")
    for fields in (
        {"model": str(tmp_path / "out" / "model")},
        {"model": str(tmp_path / "link")},
        {"model": bert, "tokenizer": str(tmp_path / "out" / "model")},
    ):
        assert "is inside --output" in refused(capsys, output=str(tmp_path / "out"), overwrite=True, **fields)
    assert listing(tmp_path / "out") == before
    again = run_here(*SNLI, model=bert, output=str(tmp_path / "out"), overwrite=True, **QUICK)
    assert again["attention"] == "softmax"


def test_the_record_is_written_whole_or_not_at_all(bert, tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        run_here(*SNLI, model=bert, output=str(tmp_path / "out"), **QUICK)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "run.json").exists()
    run_here(*SNLI, model=bert, output=str(tmp_path / "out"), **QUICK)  # what is left does not get in the way
    assert json.loads((tmp_path / "out" / "run.json").read_text())["model"] == bert
