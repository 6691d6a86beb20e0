"""Every Python block of the README and of the guides runs, a document in one session, with tiny models in place of
those on the Hub; and the reference has every public name.
"""

import re
from pathlib import Path

import pandas
import pytest
import transformers
from support.models import tiny_gpt2
from support.word_tokenizers import tiny_tokenizer

import hf_rfattn
from hf_rfattn.mechanisms import registry

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


def tiny_classifier(cls=transformers.BertForSequenceClassification):
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 64}
    return cls(transformers.BertConfig(**sizes, vocab_size=50))


ON_THE_HUB = {
    "AutoModel": {"BAAI/bge-small-en-v1.5": lambda: tiny_classifier(transformers.BertModel)},
    "AutoModelForSequenceClassification": {"google-bert/bert-base-uncased": tiny_classifier},
    "AutoModelForCausalLM": {"openai-community/gpt2": tiny_gpt2},
    "AutoTokenizer": {
        "google-bert/bert-base-uncased": tiny_tokenizer,
        "openai-community/gpt2": tiny_tokenizer,
        "BAAI/bge-small-en-v1.5": tiny_tokenizer,
    },
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the blocks of a document and returns its session; what it writes and registers is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))
    for name, known in ON_THE_HUB.items():
        auto = getattr(transformers, name)

        def from_pretrained(where, *args, load=auto.from_pretrained, known=known, **kwargs):
            return known[where]() if where in known else load(where, *args, **kwargs)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)

    def run_blocks(document, **session):
        blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block.replace("steps=400", "steps=2"), str(document), "exec"), session)
        return session

    return run_blocks


TEXTS = ["the good film", "bad"] * 20


def test_every_python_block_of_the_readme_runs(run):
    session = run(ROOT / "README.md", texts=TEXTS)
    assert Path("my-model/model.safetensors").exists()
    assert session["tokenizer"].model_max_length == 2048


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs bge-small and WikiText-2 in {SHARED}")
def test_the_readme_prints_what_its_model_gives(capsys):
    """The first block, with the real model."""
    code, printed = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README, flags=re.DOTALL).groups()
    code = code.replace("BAAI/bge-small-en-v1.5", str(SHARED / "models" / "bge-small-en-v1.5"))
    texts = pandas.read_parquet(SHARED / "data" / "wikitext-2-raw-v1" / "validation.parquet").text
    exec(code, {"texts": [text for text in texts if len(text) > 200]})
    expected, found = (float(re.search(r"tensor\(\[(.*?)\]", text)[1]) for text in (printed, capsys.readouterr().out))
    assert abs(expected - found) < 2e-3


@pytest.mark.parametrize("document", [ROOT / "docs" / "index.md", *GUIDES], ids=lambda path: path.stem)
def test_every_python_block_of_the_guides_runs(run, document):
    """Of what a guide does not make itself there are texts alone."""
    run(document, texts=TEXTS)


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert set(hf_rfattn.__all__) <= set(re.findall(r"(?:::: |heading: )hf_rfattn\.(\w+)\b", text))
