"""CONTRIBUTING.md, followed literally: its mechanism, in one new file, and the suite finds it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_bert, tiny_gpt2

from hf_rfattn import patch_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_mechanism_in_one_new_file(tmp_path):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"Make `hf_rfattn/mechanisms/(\w+)\.py`", guide)
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    for folder in ("hf_rfattn", "tests", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "hf_rfattn" / "mechanisms" / f"{name}.py").write_text(code, encoding="utf-8")

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    listed = run("-c", "from hf_rfattn.cli import app; app(['list'])")
    assert f"\n{name}  Linear attention with squared coordinates." in listed
    files = [f"tests/test_{part}.py" for part in ("mechanisms", "checkpoint", "cost")]
    said = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"{name} and not slow", *files)
    assert int(re.findall(r"(\d+) passed", said)[0]) > 30


@pytest.mark.parametrize(
    ("make", "attention", "operator"),
    [
        (tiny_bert, "favor+", "attend_to_all"),
        (tiny_gpt2, "favor+", "attend_to_past"),
        (tiny_bert, "fmm", "attend_in_blocks"),
    ],
)
def test_the_way_through_the_house(make, attention, operator):
    """Each step of the table is taken, in its order; of the three operators, the one that is meant."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| .*\|$", text, flags=re.MULTILINE)
    steps = [re.findall(r"`(?:\w+\.)?(\w+)`, `([\w/]+\.py)`", row) for row in rows]
    assert len(steps) == 6 and all(steps)
    called = calls_of(patch_model(make(), attention), use_cache=False)
    order = []
    for step in steps:
        taken = {name: called.get((name, str(ROOT / "hf_rfattn" / file))) for name, file in step}
        order += [taken[operator]] if len(step) > 1 else taken.values()
    assert None not in order and (order == sorted(order) or attention == "fmm")  # which has near and far fields


def test_the_way_of_generation():
    found = {name for name, _ in calls_of(patch_model(tiny_gpt2(), "favor+"), use_cache=True)}
    assert {"hand_on_cache", "extend", "attend_after"} <= found


def calls_of(model, **options):
    """Functions (name, file) in the order of their first call in a forward pass."""
    called = {}

    def note(frame, event, argument):
        if event == "call":
            called.setdefault((frame.f_code.co_name, frame.f_code.co_filename), len(called))

    if not model.can_generate():
        options = {}
    sys.setprofile(note)
    try:
        with torch.no_grad():
            model(torch.arange(1, 21)[None], attention_mask=torch.ones(1, 20, dtype=torch.long), **options)
    finally:
        sys.setprofile(None)
    return called
