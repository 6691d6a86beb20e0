"""Ctrl-C in any command, and a disk that is full: one line, no traceback, and nothing half-written."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest
import transformers
import typer
import write_text
from safetensors import SafetensorError
from support import sample
from support.commands import run
from support.recipes import ROOT, environment
from training import messages, session
from training.options import CommonOptions
from typer.testing import CliRunner

from hf_rfattn.cli import app


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_patch_on_a_full_disk(bert, tmp_path, monkeypatch, error, existing):
    def full(self, folder, **_):
        self.config.save_pretrained(folder)
        raise error

    target = tmp_path / "out"
    if existing:
        target.mkdir()
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    said = run("patch", bert, "favor+", "-o", target, code=2)
    assert said.splitlines()[-1] == (  # transformers shows its progress before it
        f"hf-rfattn: The disk of {target} is full, so nothing was written. Free some space or choose another folder."
    )
    assert [path.name for path in tmp_path.rglob("*")] == (["out"] if existing else [])
    monkeypatch.undo()
    run("patch", bert, "favor+", "-o", target)
    assert (target / "model.safetensors").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["patch", "{bert}", "favor+", "-o", "{out}"], "transformers.PreTrainedModel.save_pretrained"),
        (["inspect", "{bert}"], "hf_rfattn.integration.discovery.find_attention"),
        (["bench", "ops", "--lengths", "32", "--output", "{out}"], "hf_rfattn.bench.ops.measure"),
        (["study", "mse", "--output", "{out}"], "hf_rfattn.study.Study.run"),
        (["convert", "{bert}", "fmm", "--data", "{bert}", "-o", "{out}"], "hf_rfattn.cli.converting.read_texts"),
        (["card", "{bert}"], "hf_rfattn.hub.cards.CheckpointFolder"),
    ],
)
def test_commands_of_the_package(bert, tmp_path, monkeypatch, words, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    result = CliRunner().invoke(app, [word.format(bert=bert, out=tmp_path / "out") for word in words])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "hf-rfattn: Interrupted. Run the same command to start again."
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [demo, write_text])
def test_scripts_that_typer_runs(script, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    made = typer.Typer()
    made.command()(script.main)
    monkeypatch.setattr(demo.compare, "main", interrupted)
    monkeypatch.setattr(write_text.AutoTokenizer, "from_pretrained", interrupted)
    words = ["--output", str(tmp_path / "out"), "--model", "x"]
    result = CliRunner().invoke(made, words)
    assert result.exit_code == 130 and result.stderr.count("\n") == 1 and "Interrupted." in result.stderr


@pytest.mark.parametrize("saved", [False, True])
def test_a_recipe_says_whether_there_is_a_checkpoint(tmp_path, capsys, saved):
    def interrupted(begun):
        begun.open_output()
        if saved:
            (tmp_path / "out" / session.STATES / "step-00000004").mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit), messages.script():
        session.in_session(CommonOptions(output=str(tmp_path / "out")), "task", interrupted)
    expected = "to continue from the last checkpoint." if saved else "starts from the beginning."
    assert capsys.readouterr().err.endswith(expected + "\n")


def test_other_errors_are_shown_as_ever(capsys):
    messages._hook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err.endswith(": Interrupted.\n")
    messages._hook(ValueError, ValueError("x"), None)
    assert capsys.readouterr().err == "ValueError: x\n"


def start(*words):
    # jobs in the background of a script inherit that Ctrl-C is ignored
    code = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); del sys.argv[0]; "
        f"sys.path.insert(0, {str(ROOT / 'recipes')!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], env=environment(), stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("when", ["loading", "training"])
def test_a_recipe(bert, tmp_path, when):
    words = ["--data", sample.folder("snli"), "--max-steps", 4000, "--save-every", 1, "--output", tmp_path / "out"]
    process = start(ROOT / "recipes" / "finetune_snli.py", "--model", bert, *words)
    deadline = time.monotonic() + 100
    if when == "loading":
        while "pyarrow" not in memory_map(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    while when == "training" and not list(tmp_path.glob("out/state/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130), said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    if when == "loading":
        assert last == "finetune_snli.py: Interrupted." and not (tmp_path / "out").exists()
    else:
        assert last.startswith("finetune_snli.py: Interrupted. Run the same command with --resume")


def memory_map(pid):
    """Names the libraries that a process has loaded."""
    path = Path(f"/proc/{pid}/maps")
    return path.read_text() if path.exists() else ""
