"""Every recipe from its options to its result file, on `sample` data and tiny models."""

import dataclasses
import json
from pathlib import Path

import finetune_glue
import finetune_lm
import finetune_snli
import finetune_squad
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import sample
from support.recipes import NO_DROPOUT, SHAPE, WORDS, make_bert, make_gpt2, run_here, sample_tokenizer
from training.teaching import make_teacher

import hf_rfattn
from hf_rfattn.hub.cards import make_card
from hf_rfattn.results.documents import checkpoint_fingerprint
from hf_rfattn.results.schema import parse_result

GLUE = (finetune_glue.GlueTask, finetune_glue.GlueOptions)
SNLI = (finetune_snli.SnliTask, finetune_snli.ClassificationOptions)
SQUAD = (finetune_squad.SquadTask, finetune_squad.SquadOptions)
LANGUAGE = (finetune_lm.LanguageTask, finetune_lm.LanguageOptions)
QUICK = {"data": "sample", "max_train_samples": 64, "max_eval_samples": 37, "max_steps": 3, "batch_size": 8}
LEARN = {
    "data": "sample", "learning_rate": 1e-3, "warmup": 50, "scheduler": "constant", "weight_decay": 0.0,
    "evaluate_every": 1000, "max_eval_samples": 200,
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return make_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.mark.parametrize("task", finetune_glue.TASKS)
def test_glue(bert, tmp_path, task):
    result = run_here(*GLUE, model=bert, task=task, attention="favor+", output=str(tmp_path), **QUICK)
    parse_result(result)
    expected = {
        "cola": {"matthews_correlation"},
        "stsb": {"pearson", "spearmanr"},
        "mrpc": {"accuracy", "f1"},
        "qqp": {"accuracy", "f1"},
        "mnli": {"accuracy", "accuracy_mismatched"},
    }
    assert set(result["metrics"]) == expected.get(task, {"accuracy"})
    assert all(metric["n"] == 37 for metric in result["metrics"].values())
    assert result["dataset"]["split"].count(",") == (task == "mnli")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.num_labels == {"stsb": 1, "mnli": 3}.get(task, 2)


def test_the_result_file(bert, tmp_path):
    """All that the issue wants recorded, and a card can be made of it."""
    options = {"attention": "fmm", "attention_options": ["bandwidth=4"], "layers": "1", "seed": 5}
    result = run_here(*SNLI, model=bert, output=str(tmp_path), **options, **{**QUICK, "max_steps": 6})
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == Path(bert).name and result["seed"] == 5
    assert result["attention"]["layers"]["1"]["bandwidth"] == 4
    assert result["budget"]["steps"] == 6 and result["budget"]["epochs"] == 0.75
    assert result["processes"] == 1 and result["hardware"]["cpu"] and result["git"].keys() == {"commit", "changed"}
    assert result["versions"]["accelerate"] and result["versions"]["scikit-learn"]
    for name in ("samples_per_second", "tokens_per_second", "peak_memory_bytes"):
        assert result[name] > 0
    assert 0 < result["train_seconds"] < result["wall_time_seconds"]
    # sample pairs have 10 tokens each: nothing is padded
    assert result["tokens_per_second"] == pytest.approx(10 * result["samples_per_second"])
    assert (
        len(result["attention_error"]["before"]["overall"]) == len(result["attention_error"]["after"]["average"]) == 1
    )
    assert result["checkpoint"] == checkpoint_fingerprint(tmp_path / "model")
    card = make_card(tmp_path / "model")
    assert card.data.eval_results[0].metric_value == result["metrics"]["accuracy"]["value"]
    text = (tmp_path / "model" / "README.md").read_text()
    assert "fine-tuned on snli" in text
    # what would be published names no folder of this machine
    sent = [path.read_text() for path in [*(tmp_path / "model").rglob("*.json"), tmp_path / "model" / "README.md"]]
    assert result["options"]["output"] == str(tmp_path)
    assert not [text for text in sent if str(tmp_path) in text or str(Path(bert).parent) in text]


def test_attention_as_it_is_or_softmax(bert, tmp_path):
    """A patched checkpoint stays patched unless told otherwise."""
    run_here(*SNLI, model=bert, attention="hedgehog", output=str(tmp_path / "a"), **QUICK)
    patched = str(tmp_path / "a" / "model")
    again = run_here(*SNLI, model=patched, mechanism_learning_rate=1e-2, output=str(tmp_path / "b"), **QUICK)
    assert again["attention"] == {"mechanism": "hedgehog", "num_features": None}
    plain = run_here(*SNLI, model=patched, attention="softmax", output=str(tmp_path / "c"), **QUICK)
    assert plain["attention"] == "softmax" and plain["attention_error"] is None
    assert not (tmp_path / "c" / "model" / "README.md").exists()


@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_squad(request, tmp_path, family, version):
    model = request.getfixturevalue(family)
    result = run_here(
        *SQUAD, model=model, version=version, attention="favor+", stride=4, max_length=20, output=str(tmp_path), **QUICK
    )
    parse_result(result)
    assert set(result["metrics"]) == {"exact_match", "f1"}
    assert result["metrics"]["f1"]["n"] == 37 and result["metrics"]["f1"]["scale"] == 100
    chance = result["metrics"]["f1"]["chance"]  # of no answer to any question
    assert 0 < chance < 100 if version == "2" else chance == 0


def test_language_from_scratch_and_on(gpt2, tmp_path):
    """A new GPT-2 in the shape of another is pretrained, then patched and trained on."""
    quick = {**QUICK, "max_train_samples": 300, "max_length": 32}
    first = run_here(*LANGUAGE, model=gpt2, from_scratch=True, seed=1, output=str(tmp_path / "a"), **quick)
    assert first["model"] == f"{Path(gpt2).name} from scratch" and first["attention"] == "softmax"
    new, old = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "a" / "model", gpt2))
    assert new.keys() == old.keys() and not torch.allclose(
        new["transformer.wte.weight"], old["transformer.wte.weight"], atol=0.05
    )
    second = run_here(
        *LANGUAGE,
        model=str(tmp_path / "a" / "model"),
        attention="favor+",
        output=str(tmp_path / "b"),
        **quick,
    )
    assert second["attention"]["mechanism"] == "favor+"
    assert set(second["metrics"]) == {"perplexity", "loss", "bits_per_byte"}
    assert second["metrics"]["perplexity"]["lower_is_better"]
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "b" / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b" / "model")
    text = words(" bread water", return_tensors="pt")
    assert model.generate(**text, max_new_tokens=3).shape[1] > text["input_ids"].shape[1]


def test_perplexity_is_that_of_the_model(gpt2, tmp_path):
    """Against the model's own loss on the text as one piece."""
    options = {**QUICK, "max_eval_samples": 3, "max_steps": 1, "max_length": 64}
    result = run_here(*LANGUAGE, model=gpt2, output=str(tmp_path), **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    words = transformers.AutoTokenizer.from_pretrained(gpt2)
    text = "".join(row["text"] for row in sample.make("wikitext", "validation")[:3])
    ids = words(text, return_tensors="pt")["input_ids"]
    assert ids.shape[1] <= 64
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert result["metrics"]["loss"]["value"] == pytest.approx(loss, rel=1e-5)
    bits = loss * (ids.shape[1] - 1) / torch.log(torch.tensor(2.0)).item() / len(text.encode())
    assert result["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)


def roberta(folder):
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=4 + len(WORDS),
        intermediate_size=48,
        max_position_embeddings=40,
        pad_token_id=0,
        **SHAPE,
        **NO_DROPOUT,
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    sample_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["bert", "gpt2", "roberta"])
@pytest.mark.parametrize("attention", ["softmax", "favor+"])
def test_padding_changes_nothing(family, attention, tmp_path):
    """Alone or beside longer texts, whatever side the tokenizer pads on: the same scores. GPT-2 has no padding token of
    its own.
    """
    folder = {"bert": make_bert, "gpt2": make_gpt2, "roberta": roberta}[family](tmp_path / "model")
    logits = {}
    for side in ("right", "left"):
        words = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
        words.save_pretrained(tmp_path / side)  # which keeps what it was loaded with, not what was set later
        task = finetune_glue.GlueTask(
            finetune_glue.GlueOptions(
                model=folder,
                tokenizer=str(tmp_path / side),
                task="sst2",
                data=sample.folder("sst2"),
                max_eval_samples=4,
            )
        )
        torch.manual_seed(0)
        prepared = task.prepare()
        assert prepared.tokenizer.padding_side == side
        if attention != "softmax":
            hf_rfattn.patch_model(prepared.model, attention)
        model = prepared.model.eval()
        rows = [prepared.evaluation["validation"][i] for i in range(4)]
        short = {k: v[:5] if isinstance(v, list) else v for k, v in rows[0].items()}
        with torch.no_grad():
            together = prepared.collate([short, *rows[1:]])
            logits[side] = model(**together).logits
            alone = model(**prepared.collate([short])).logits
        assert together["attention_mask"][0].sum() == 5 < together["attention_mask"].shape[1]
        torch.testing.assert_close(logits[side][:1], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits["left"], logits["right"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "answers", "language"])
def test_sample_needs_attention(kind, bert, gpt2, tmp_path):
    """The same model, budget and data: softmax solves it, plain averaging does not get far from guessing."""
    recipe, fields, metric = {
        "classification": (SNLI, {"model": bert, "max_steps": 500}, "accuracy"),
        "answers": (SQUAD, {"model": bert, "max_steps": 400, "stride": 4, "max_length": 32}, "exact_match"),
        "language": (
            LANGUAGE,
            {"model": gpt2, "max_steps": 200, "max_length": 48, "learning_rate": 4e-3, "batch_size": 16},
            "perplexity",
        ),
    }[kind]
    found = {
        attention: run_here(*recipe, attention=attention, output=str(tmp_path / attention), **{**LEARN, **fields})
        for attention in ("softmax", "average")
    }
    softmax, average = (found[name]["metrics"][metric]["value"] for name in ("softmax", "average"))
    if kind == "language":
        assert softmax < 0.65 * average
    else:
        guess = {"classification": 1 / 3, "answers": 25.0}[kind]
        assert softmax > 0.95 * found["softmax"]["metrics"][metric]["scale"]
        assert average < 1.3 * guess


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pooling(bert, tmp_path, pooling):
    """The head reads what --pooling says, without padding; the recipe that continues from the model does the same."""
    options = {"pooling": pooling, "data": sample.folder("sst2"), "max_train_samples": 16, "max_eval_samples": 4}
    task = finetune_glue.GlueTask(finetune_glue.GlueOptions(model=bert, **options))
    prepared = task.prepare()
    model = prepared.model.eval()
    row = prepared.evaluation["validation"][0]
    short = {name: cells[:5] if isinstance(cells, list) else cells for name, cells in row.items()}
    batch = prepared.collate([short, row])
    with torch.no_grad():
        hidden = model.bert(**{k: v for k, v in batch.items() if k != "labels"}).last_hidden_state
        expected = hidden[0, 0] if pooling == "cls" else hidden[0, :5].mean(0)
        torch.testing.assert_close(model(**batch).logits[0], model.classifier(expected))
    trained = run_here(*GLUE, model=bert, output=str(tmp_path / "a"), max_steps=2, batch_size=4, **options)
    options["pooling"] = None
    again = run_here(
        *GLUE, model=str(tmp_path / "a" / "model"), output=str(tmp_path / "b"), evaluate_first=True, max_steps=1,
        batch_size=4, **options,
    )  # fmt: skip
    assert again["history"][0]["metrics"] == trained["metrics"]
    folder = str(tmp_path / "a" / "model")
    options = finetune_glue.GlueOptions(model=folder, distill="self")
    teacher = make_teacher(torch.device("cpu"), model, options).model  # what it teaches is pooled likewise
    student = finetune_glue.GlueTask(dataclasses.replace(options, data=sample.folder("sst2"))).prepare().model.eval()
    with torch.no_grad():
        torch.testing.assert_close(teacher(**batch).logits, student(**batch).logits)
    assert not any("pooler" in name for name in load_file(tmp_path / "b" / "model" / "model.safetensors"))


def test_pooling_needs_a_pooler(gpt2):
    options = finetune_glue.GlueOptions(model=gpt2, data=sample.folder("sst2"), pooling="mean", max_train_samples=4)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no pooler"):
        finetune_glue.GlueTask(options).prepare()
    with pytest.raises(ValueError, match="does not work with --sequence-parallel"):
        finetune_glue.GlueOptions(model=gpt2, pooling="mean", sequence_parallel=2)
