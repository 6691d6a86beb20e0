"""Text that a model writes itself, for comparisons of language models."""

import json

import pytest
import typer
import write_text
from support.recipes import make_gpt2
from transformers import AutoTokenizer


def test_a_model_writes_its_own_text(tmp_path):
    model = str(make_gpt2(tmp_path / "gpt2"))
    with pytest.raises(typer.BadParameter, match="no first token"):
        write_text.main(model, tmp_path / "out", train=1, validation=1, length=4, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)
    found = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        write_text.main(model, tmp_path / name, train=3, validation=2, length=12, seed=seed)
        files = [tmp_path / name / f"{split}.jsonl" for split in ("train", "validation")]
        found[name] = [[json.loads(line)["text"] for line in file.read_text().splitlines()] for file in files]
        assert [len(texts) for texts in found[name]] == [3, 2]
        assert any(len(text.split()) > 3 for texts in found[name] for text in texts)
    assert found["first"] == found["again"] != found["other"]
    with pytest.raises(typer.BadParameter, match="is not empty"):
        write_text.main(model, tmp_path / "first", train=1, validation=1, length=4, seed=0)
