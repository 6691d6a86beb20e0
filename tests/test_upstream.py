"""`make upstream`: which outcomes of transformers' own tests it accepts, tried on a checkout made here."""

import json
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / ".ci" / "upstream"))
import upstream  # noqa: E402

TESTS = """
import unittest
import torch
from transformers import BertConfig, BertModel

def tiny():
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return BertModel._from_config(config, attn_implementation="eager")

class BertModelTest(unittest.TestCase):
    has_attentions = True
    def test_forward(self):
        assert tiny()(torch.tensor([[1, 2]])).last_hidden_state.isfinite().all()
    def test_dict_output(self):
        tiny()(torch.tensor([[1, 2]]), output_attentions=self.has_attentions)
    def test_attention_outputs(self):
        assert tiny()(torch.tensor([[1, 2]]), output_attentions=True).attentions
    def test_fails_anyway(self):
        assert tiny() is None
    def test_without_model(self):
        pass
"""


def test_the_list_and_the_result_agree():
    """Both are from the same run, and each failure has a reason."""
    rows = json.loads(upstream.RESULT.read_text(encoding="utf-8"))["rows"]
    assert [(row["model"], row["attention"]) for row in rows] == [
        (model, attention) for model in upstream.MODELS for attention in upstream.ATTENTIONS
    ]
    failed = {upstream.Failure(row["attention"], test): why for row in rows for test, why in row["failed"].items()}
    assert failed == upstream.read_expected() and upstream.TODO not in failed.values()
    assert all(row["passed"] == row["counted"] - len(row["failed"]) for row in rows)


def test_updating_changes_nothing_else(tmp_path, monkeypatch):
    text = upstream.EXPECTED.read_text(encoding="utf-8")
    expected = upstream.read_expected()
    monkeypatch.setattr(upstream, "EXPECTED", tmp_path / "expected.yaml")
    upstream.EXPECTED.write_text(text)
    upstream.write_expected(expected)
    assert upstream.EXPECTED.read_text() == text
    new = upstream.Failure("fmm", "BertModelTest::test_new")
    upstream.write_expected(expected | {new: upstream.TODO})
    assert upstream.read_expected() == expected | {new: upstream.TODO}
    upstream.EXPECTED.write_text(text + text.partition("\n- ")[1].lstrip("\n") + text.partition("\n- ")[2])
    with pytest.raises(SystemExit, match="twice"):
        upstream.read_expected()


def test_a_folder_that_is_no_checkout(tmp_path):
    with pytest.raises(SystemExit, match="needs src/transformers and tests/models"):
        upstream.check_version(tmp_path)
    make_checkout(tmp_path, version="1.2.3")
    with pytest.raises(SystemExit, match=rf"has transformers 1\.2\.3, .* check out v{transformers.__version__}"):
        upstream.check_version(tmp_path)


def test_what_fails_a_run():
    listed = {upstream.Failure("fmm", f"{name}::test_one"): "a reason" for name in ("Ran", "DidNotRun")}
    failed = {upstream.Failure("fmm", "Ran::test_two")}
    assert list(upstream.find_faults(listed, failed, {"Ran"})) == [
        "fails, but is not listed: Ran::test_two with fmm",
        "does not fail, but is listed: Ran::test_one with fmm",
    ]
    assert not list(upstream.find_faults(listed, set(listed), {"Ran"}))


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch, capsys):
    """First one that updates the list, then one that agrees with it."""
    checkout = make_checkout(tmp_path / "transformers", transformers.__version__)
    for name in ("EXPECTED", "RESULT", "OUTPUT"):
        monkeypatch.setattr(upstream, name, tmp_path / name.lower())
    monkeypatch.setattr(upstream, "ROOT", tmp_path)
    monkeypatch.setattr(upstream, "MODELS", ("bert",))
    monkeypatch.setattr(upstream, "ATTENTIONS", ("favor+",))
    upstream.EXPECTED.write_text("# A comment.\n- reason: it must\n  tests: {test_forward: [BertModelTest]}\n")
    with pytest.raises(SystemExit, match="1 outcomes are not as"):
        upstream.main(checkout, "bert", True, None)
    assert "fails, but has no reason: BertModelTest::test_attention_outputs with favor+" in capsys.readouterr().out
    assert not upstream.RESULT.exists()
    text = upstream.EXPECTED.read_text()
    assert text.startswith("# A comment.\n") and "it must" not in text

    upstream.EXPECTED.write_text(text.replace("TODO", "no matrices"))
    upstream.main(checkout, "bert", False, "made by a test")
    result = json.loads(upstream.RESULT.read_text())
    (row,) = result["rows"]
    assert (row["passed_unpatched"], row["counted"], row["passed"]) == (4, 3, 2)
    assert row["failed"] == {"BertModelTest::test_attention_outputs": "no matrices"}
    assert result["checkout"]["note"] == "made by a test"


def make_checkout(folder: Path, version: str) -> Path:
    package, tests = folder / "src" / "transformers", folder / "tests" / "models" / "bert"
    for each in (package, tests):
        each.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (tests / "test_modeling_bert.py").write_text(TESTS)
    return folder
