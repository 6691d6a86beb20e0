"""The sdist and the wheel: what is in them, and that the wheel works where the repository is not."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.commands import QUICK_OPS

ROOT = Path(__file__).parents[1]
JOB = """
import sys
from pathlib import Path
import torch, hf_rfattn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

assert Path(hf_rfattn.__file__).is_relative_to(sys.argv[1]), hf_rfattn.__file__
size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**size)).eval()
model.save_pretrained("softmax")
hf_rfattn.patch_model(model, "fmm", bandwidth=4)
model.save_pretrained("patched")
again = AutoModelForCausalLM.from_pretrained("patched")
prompt = torch.arange(1, 9)[None]
written = [m.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None) for m in (model, again)]
assert written[0].shape == (1, 13) and torch.equal(*written)
"""
COMMANDS = [
    ["--version"],
    ["list"],
    ["inspect", "softmax", "--lengths", "64"],
    ["patch", "softmax", "favor+", "num_features=8", "-o", "random"],
    ["unpatch", "random", "-o", "back"],
    ["card", "patched", "--repo", "me/name"],
    ["publish", "patched", "--repo", "me/name", "--dry-run"],
    ["bench", "ops", *QUICK_OPS, "--lengths", "32,64", "--features", "8", "--dtype", "float32"],
    ["study", "time", "--help"],
]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says what belongs to the repository")
    return {name for name in run("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """Folder with sdist and wheel, made from what git tracks."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


def test_sdist_is_the_repository(built, tracked):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in inside if name.startswith("hf_rfattn.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert inside - made == tracked


def test_wheel_is_the_package(built, tracked):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == {name for name in tracked if name.startswith("hf_rfattn/")}


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(built, tmp_path):
    """Patch, save, load, generate and every command, from the installed wheel, offline, in an empty folder."""
    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run(*pip, "--target", place, next(built.glob("*.whl")))
    environment = os.environ | {"PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    folder = tmp_path / "work"
    folder.mkdir()
    options = {"cwd": folder, "env": environment}
    run(sys.executable, "-c", JOB, place, **options)
    for command in COMMANDS:
        assert run(sys.executable, place / "bin" / "hf-rfattn", *command, **options)
    assert (folder / "patched" / "README.md").exists()
