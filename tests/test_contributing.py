"""CONTRIBUTING.md, followed literally: its mechanism, in one new file, and the suite finds it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_mechanism_in_one_new_file(tmp_path):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"Create `hf_rfattn/mechanisms/(\w+)\.py`", guide)
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    for folder, without in (("hf_rfattn", ()), ("tests", ()), ("recipes", ("results",))):
        ignore = shutil.ignore_patterns("__pycache__", *without)
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
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
