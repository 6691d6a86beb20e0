"""Optional packages: what works without them, and that the error of what does not names the extra to install."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.models import tiny_bert
from support.word_tokenizers import tiny_tokenizer

from hf_rfattn.install import PACKAGE, install_command
from hf_rfattn.results.messages import EXTRAS, script

ROOT = Path(__file__).parents[1]
CODE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = sys.argv[1].split(",")

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
JOB = """
import torch, hf_rfattn
from pathlib import Path
from transformers import AutoModel

softmax, patched = sys.argv[2:]
model = hf_rfattn.patch_model(AutoModel.from_pretrained(softmax), "fmm", bandwidth=4)
model.save_pretrained(patched)
again = AutoModel.from_pretrained(patched)
ids = torch.arange(1, 9)[None]
assert torch.equal(model(ids).last_hidden_state, again(ids).last_hidden_state)
print(hf_rfattn.convert(again, None, [{"input_ids": ids}], steps=2))

from hf_rfattn.cli import app
app(["list"], standalone_mode=False)
app(["inspect", softmax], standalone_mode=False)
app(["patch", softmax, "favor+", "-o", patched + "_favor"], standalone_mode=False)
texts = Path(softmax) / "texts.jsonl"
texts.write_text('{"text": "good film"}\\n' * 9)
words = ["--data", str(texts), "--steps", "2", "-o", patched + "_converted"]
app(["convert", softmax, "hedgehog", *words], standalone_mode=False)
app(["unpatch", patched + "_favor", "-o", patched + "_back"], standalone_mode=False)
"""


def run(code, blocked, *words):
    """A fresh process that cannot import some packages."""
    command = [sys.executable, "-c", CODE + code, ",".join(blocked), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


def command(blocked, *words):
    return run("from hf_rfattn.cli import app; app(sys.argv[2:])", blocked, *words)


def test_extras_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        named = [re.split(r"[<>=]", requirement)[0] for requirement in project["optional-dependencies"][extra]]
        assert package.replace("_", "-") in named
    assert not set(EXTRAS) & {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}


def test_the_base_needs_no_extra(tmp_path):
    """Patch, save, load, convert, and the commands that do the same."""
    tiny_bert().save_pretrained(tmp_path / "softmax")
    tiny_tokenizer().save_pretrained(tmp_path / "softmax")
    blocked = [*(set(EXTRAS) - {"rich"}), "peft"]  # typer brings rich, for its own help
    done = run(JOB, blocked, tmp_path / "softmax", tmp_path / "patched")
    assert done.returncode == 0, done.stderr
    assert "hedgehog" in done.stdout and "Break-even" in done.stdout
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "patched_back").iterdir()}


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ["bench", "decode"]),
        ("matplotlib", ["study", "gram"]),
        ("datasets", ["convert", "bert", "hedgehog", "--data", "me/texts", "-o", "out"]),
    ],
)
def test_a_command_names_the_extra_before_it_measures(package, words):
    done = command([package], *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"needs the package {package}; run {install_command(EXTRAS[package])}" in done.stderr


def test_a_missing_part_of_an_installed_package_is_no_missing_package(capsys):
    with pytest.raises(SystemExit), script():
        import_module("transformers.of_another_version")
    assert capsys.readouterr().err.endswith(": No module named 'transformers.of_another_version'\n")


@pytest.mark.parametrize("package", ["accelerate", "sklearn", "sentence_transformers"])
def test_a_recipe_names_the_extra(package, tmp_path):
    """Most packages are needed on import, sentence-transformers only for embeddings."""
    tiny_bert().save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    code = "import runpy; sys.path.insert(0, 'recipes'); sys.argv[:2] = ['recipe.py']; "
    code += "runpy.run_path('recipes/evaluate_embeddings.py', run_name='__main__')"
    done = run(code, [package], "--model", tmp_path / "bert", "--data", tmp_path, "--output", tmp_path / "out")
    assert done.returncode and "Traceback" not in done.stderr
    assert install_command("recipes") in done.stderr.splitlines()[-1] and package in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "page", ["README.md", "recipes/README.md", *(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md"))], ids=str
)
def test_pages_install_the_package_as_messages_and_cards_do(page):
    """`hf_rfattn.install` says how; a page may add an extra or -e."""
    found = re.findall(r"pip install (?:-e )?'?(hf-rfattn|\.)", (ROOT / page).read_text())
    assert set(found) <= {PACKAGE} and (found or page != "README.md")


def test_only_one_file_says_how_to_install_the_package():
    for path in ROOT.glob("hf_rfattn/**/*.py"):
        assert path.name == "install.py" or not re.search(
            r"pip install (-U |--upgrade )?'?(hf-rfattn|\.)", path.read_text()
        ), path
