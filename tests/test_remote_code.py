"""Saved folders carry a file that loads them with `trust_remote_code=True`, where nobody imports this package first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models import altered, assert_same_model, hidden, ids, tiny_bert, tiny_gpt2, tiny_llama
from support.word_tokenizers import tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    LlavaConfig,
    dynamic_module_utils,
)

import hf_rfattn
from hf_rfattn import patch_model, unpatch_model

FILE = "modeling_hf_rfattn.py"
ENTRY = {"AutoConfig": "modeling_hf_rfattn.PatchedConfig"}
SOURCE = Path(hf_rfattn.__file__).parent / "integration" / FILE


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def saved(model, folder):
    altered(model).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder)
    return model


def run(code, *arguments, cache):
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache)}
    arguments = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    return result.stdout, result.stderr


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """Where transformers copies code to before it runs it: not into the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "modules"


LOAD = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
tokens = torch.arange(1, 21)[None]
bert = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
head = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
llama = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
found = [bert(tokens).last_hidden_state, head.bert(tokens).last_hidden_state, llama(tokens).logits]
torch.save([x.detach() for x in found], sys.argv[3])
print([type(m).__module__.split(".")[0] for m in (bert, head, llama)])
"""


def test_auto_classes_load_it_without_the_import(tmp_path, modules_cache):
    bert, llama = patch_model(tiny_bert(), "favor+"), patch_model(tiny_llama(), "fmm", bandwidth=3)
    saved(bert, tmp_path / "bert")
    saved(llama, tmp_path / "llama")
    out, error = run(LOAD, tmp_path / "bert", tmp_path / "llama", tmp_path / "found", cache=modules_cache)
    assert out.strip() == "['transformers', 'transformers', 'transformers']", error
    tokens = torch.arange(1, 21)[None]
    expected = hidden(bert, input_ids=tokens), hidden(bert, input_ids=tokens), hidden(llama, input_ids=tokens)
    for x, y in zip(torch.load(tmp_path / "found"), expected, strict=True):
        assert torch.equal(x, y)


MISSING = """
import sys
class Missing:
    def find_spec(self, name, *rest):
        if name == "hf_rfattn":
            raise ModuleNotFoundError("No module named 'hf_rfattn'")
sys.meta_path.insert(0, Missing())
from transformers import AutoModel
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def test_without_the_package_transformers_says_what_to_install(tmp_path, modules_cache):
    saved(patch_model(tiny_bert(), "favor+"), tmp_path / "bert")
    last = run(MISSING, tmp_path / "bert", cache=modules_cache)[1].strip().splitlines()[-1]
    assert last.startswith("ImportError") and "Run `pip install hf_rfattn`" in last


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}], ids=str)
def test_with_the_plugin_nothing_of_the_folder_is_run(tmp_path, monkeypatch, trust):
    model = saved(patch_model(tiny_bert(), "favor+"), tmp_path)
    (tmp_path / FILE).write_text("raise RuntimeError('run')")
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("transformers asked whether to run code"))
    assert_same_model(model, AutoModel.from_pretrained(tmp_path, **trust), input_ids=ids())
    assert_same_model(model, BertModel.from_pretrained(tmp_path), input_ids=ids())
    with pytest.raises(RuntimeError, match="run"):
        AutoModel.from_pretrained(tmp_path, trust_remote_code=True)


def test_classes_of_transformers_stay_as_they_are(tmp_path):
    """transformers marks classes that came with a checkpoint, and would save their source with every model."""
    model = saved(patch_model(tiny_bert(), "favor+"), tmp_path / "first")
    again = AutoModel.from_pretrained(tmp_path / "first", trust_remote_code=True, output_loading_info=True)[0]
    assert_same_model(model, again, input_ids=ids())
    assert type(again) is BertModel and type(again.config) is BertConfig
    assert BertModel._auto_class is None and BertConfig._auto_class is None
    again.save_pretrained(tmp_path / "second")
    assert {p.name for p in (tmp_path / "second").iterdir()} == {"config.json", "model.safetensors", FILE}
    assert config_of(tmp_path / "second") == config_of(tmp_path / "first")
    assert (tmp_path / "second" / FILE).read_bytes() == SOURCE.read_bytes()
    config, unused = AutoConfig.from_pretrained(
        tmp_path / "first", trust_remote_code=True, return_unused_kwargs=True, num_labels=5, other=1
    )
    assert config.num_labels == 5 and unused == {"other": 1}


def test_the_entry_follows_the_patch(tmp_path):
    model = saved(patch_model(tiny_bert(), "favor+"), tmp_path / "patched")
    assert config_of(tmp_path / "patched")["auto_map"] == ENTRY and not hasattr(model.config, "auto_map")
    for name, patched in (("memory", model), ("loaded", AutoModel.from_pretrained(tmp_path / "patched"))):
        unpatch_model(patched).save_pretrained(tmp_path / name)
        assert "auto_map" not in config_of(tmp_path / name) and not (tmp_path / name / FILE).exists()
        AutoModel.from_pretrained(tmp_path / name, trust_remote_code=True)


def test_entries_of_others(tmp_path):
    """Code of others for models and configs would not be patched; what is not about models stays."""
    model = tiny_bert()
    theirs = {"AutoModel": "them/repo--modeling_x.X", "AutoConfig": "them/repo--x.C", "AutoProcessor": "p.P"}
    model.config.auto_map = dict(theirs)
    patch_model(model, "favor+").save_pretrained(tmp_path / "patched")
    assert config_of(tmp_path / "patched")["auto_map"] == {**ENTRY, "AutoProcessor": "p.P"}
    unpatch_model(model).save_pretrained(tmp_path / "plain")
    assert config_of(tmp_path / "plain")["auto_map"] == theirs
    # what was loaded from the Hub has the repository's name before the file's
    model = patch_model(model, "favor+")
    model.config.auto_map = {"AutoConfig": "me/model--" + ENTRY["AutoConfig"]}
    model.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["auto_map"] == ENTRY


class TheirConfig(BertConfig):
    model_type = "theirs"


def test_models_with_code_of_their_own_keep_it(tmp_path):
    config = TheirConfig(**tiny_bert().config.to_dict())
    config.auto_map = {"AutoConfig": "theirs.TheirConfig"}
    patch_model(BertModel(config), "favor+").save_pretrained(tmp_path)
    assert config_of(tmp_path)["auto_map"] == {"AutoConfig": "theirs.TheirConfig"} and not (tmp_path / FILE).exists()


def test_a_model_inside_a_model(tmp_path):
    text = patch_model(tiny_llama(), "favor+").config
    config = LlavaConfig(text_config=text, image_token_index=49)
    config.save_pretrained(tmp_path)
    assert config_of(tmp_path)["auto_map"] == ENTRY and "auto_map" not in config_of(tmp_path)["text_config"]
    assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)) is LlavaConfig


def test_kernels_are_not_saved_by_name(tmp_path):
    model = patch_model(tiny_bert(), "favor+")
    model.config.rfattn["softmax"] = "kernels-community/flash-attn2"
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["rfattn"]["softmax"] == "sdpa"
    assert model.config.rfattn["softmax"] == "kernels-community/flash-attn2"
    assert_same_model(model, AutoModel.from_pretrained(tmp_path), input_ids=ids())


ECOSYSTEM = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from sentence_transformers import SentenceTransformer
lm = HFLM(pretrained=sys.argv[1], device="cpu", batch_size=1, trust_remote_code=True)
request = Instance("loglikelihood", {}, ("the good", " film"), 0)
likelihood = lm.loglikelihood([request], disable_tqdm=True)[0][0]
encoder = SentenceTransformer(sys.argv[2], device="cpu", trust_remote_code=True)
embedding = encoder.encode("the good film").tolist()
encoder.save(sys.argv[3])
again = SentenceTransformer(sys.argv[3], device="cpu", trust_remote_code=True).encode("the good film").tolist()
print(json.dumps({"likelihood": likelihood, "embedding": embedding, "same": again == embedding}))
"""


def test_lm_eval_and_sentence_transformers(tmp_path, modules_cache):
    pytest.importorskip("lm_eval")
    pytest.importorskip("sentence_transformers")
    gpt2, bert = patch_model(tiny_gpt2(), "favor+"), patch_model(tiny_bert(), "hedgehog")
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.mul_(5)  # so that attention matters
    saved(gpt2, tmp_path / "gpt2")
    saved(bert, tmp_path / "bert")
    out, error = run(ECOSYSTEM, tmp_path / "gpt2", tmp_path / "bert", tmp_path / "st", cache=modules_cache)
    assert out, error
    found = json.loads(out.splitlines()[-1])
    tokens = tiny_tokenizer()("the good film", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = gpt2(tokens).logits.log_softmax(-1)[0, -2, tokens[0, -1]]
        embedding = hidden(bert, input_ids=tokens).mean(1)[0]  # the default of sentence-transformers: mean pooling
    assert found["likelihood"] == pytest.approx(scores.item(), abs=1e-5)
    assert found["embedding"] == pytest.approx(embedding.tolist(), abs=1e-5) and found["same"]
    with torch.no_grad():
        softmax = unpatch_model(gpt2)(tokens).logits.log_softmax(-1)[0, -2, tokens[0, -1]]
    assert found["likelihood"] != pytest.approx(softmax.item(), abs=1e-3)
