"""Every Python block of the README runs, in order, in one session; a tiny model stands in for the one on the Hub."""

import re
from pathlib import Path

import pytest
import transformers
from test_ecosystem import tiny_tokenizer

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    load = transformers.AutoModelForSequenceClassification.from_pretrained

    def from_pretrained(name, *args, **kwargs):
        if name != "google-bert/bert-base-uncased":
            return load(name, *args, **kwargs)
        sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 64}
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=50))

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", from_pretrained)


def test_every_python_block_runs(no_hub):
    assert len(BLOCKS) >= 5
    session = {"tokenizer": tiny_tokenizer(), "texts": ["the good film", "bad"] * 20}
    for block in BLOCKS:
        exec(compile(block.replace("steps=400", "steps=2"), str(README), "exec"), session)
    assert Path("error.png").exists() and Path("my-model/model.safetensors").exists()
    assert session["out"].sequences.shape == (1, 70)
    assert session["tokenizer"].model_max_length == 4096
