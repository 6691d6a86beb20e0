"""Fine-tuning a converted model, attention transfer within a run, learning from a softmax model, LoRA."""

import json
from pathlib import Path

import datasets
import finetune_lm
import finetune_snli
import pytest
import torch
import training.run
import transformers
from safetensors.torch import load_file
from support import sample
from support.commands import run
from support.recipes import forget_processes, make_gpt2, run_here
from training.classification import ClassificationOptions
from training.models import choose_length
from training.session import make_accelerator
from training.teaching import Teacher, add_adapters, make_teacher, without_adapters

import hf_rfattn

SNLI = (finetune_snli.SnliTask, ClassificationOptions)
QUICK = {"data": "sample", "max_train_samples": 64, "max_eval_samples": 37, "max_steps": 4, "batch_size": 8}
QUICK |= {"learning_rate": 1e-3, "eval_batch_size": 16}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Pairs of sentences, as files."""
    folder = tmp_path_factory.mktemp("texts")
    rows = sample.make("snli", "train")[:60]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def tuned(bert, tmp_path_factory):
    """A softmax model that was trained on the task, a little."""
    folder = tmp_path_factory.mktemp("tuned")
    train(bert, folder, attention="softmax")
    return str(folder / "model")


def train(model, output, **fields):
    """(weights, result) of a run."""
    result = run_here(*SNLI, model=model, output=str(output), **{**QUICK, **fields})
    return load_file(output / "model" / "model.safetensors"), result


def test_from_a_model_to_a_converted_one_to_a_task(bert, texts, tmp_path):
    columns = ("--column", "premise", "--column", "hypothesis")
    given = (*columns, "--steps", 12, "--rounds", 1, "--learning-rate", 0.05, "--json")
    result = json.loads(run("convert", bert, "hedgehog", "--data", texts, "-o", tmp_path / "converted", *given))
    softmax = train(bert, tmp_path / "softmax", attention="softmax")[1]
    weights, tuned = train(str(tmp_path / "converted"), tmp_path / "tuned", model_name=Path(bert).name)
    assert result["attention"] == tuned["attention"] and tuned["transfer"]["steps"] == 12
    assert tuned["transfer"]["dataset"] == result["dataset"]
    for name in ("model", "task", "dataset", "budget"):  # so that they stand in one table
        assert tuned[name] == softmax[name]
    assert tuned["attention_error"]["before"]["overall"][0] < 0.9 * result["errors"]["before"]["overall"][0]
    assert any(".rf." in name for name in weights) and softmax["transfer"] is None


def test_a_converted_language_model_learns_from_itself(tmp_path):
    gpt2 = make_gpt2(tmp_path / "gpt2")
    for split in ("train", "test"):
        datasets.Dataset.from_list(sample.make("wikitext", "train")[:400]).to_parquet(tmp_path / f"{split}.parquet")
    given = ("bandwidth=4", "far=hedgehog", "--data", tmp_path, "--max-length", 32, "--steps", 12, "--rounds", 1)
    run("convert", gpt2, "fmm", *given, "-o", tmp_path / "out")
    fields = {"data": str(tmp_path), "eval_split": "test", "max_length": 32, "max_steps": 2, "batch_size": 4}
    result = run_here(
        finetune_lm.LanguageTask, finetune_lm.LanguageOptions, model=str(tmp_path / "out"), model_name="gpt2",
        output=str(tmp_path / "tuned"), distill="self", **fields,
    )  # fmt: skip
    assert result["metrics"]["perplexity"]["value"] > 1 and result["model"] == "gpt2"


def test_transfer_within_a_run(bert, tmp_path, monkeypatch):
    """The mechanisms are taught, then all is trained; what a torn run has learnt is not learnt again."""
    options = {"attention": "hedgehog", "transfer_steps": 10, "transfer_learning_rate": 0.05, "evaluate_first": True}
    options |= {"save_every": 2}
    whole, result = train(bert, tmp_path / "whole", **options)
    error = result["transfer"]["error"]
    assert result["transfer"]["steps"] == 10  # no rounds
    assert all(a < b for a, b in zip(error["after"], error["before"], strict=True))
    assert result["attention_error"]["before"]["overall"] == error["before"]
    assert [entry.get("stage") for entry in result["history"]][:2] == ["before training", "after transfer"]
    assert [entry["step"] for entry in result["history"]] == [0, 0, 4]

    step = training.run.Training._step

    def breaks(self, batches):
        if self.progress.step == 3:
            raise KeyboardInterrupt
        step(self, batches)

    monkeypatch.setattr(training.run.Training, "_step", breaks)
    with pytest.raises(SystemExit):
        train(bert, tmp_path / "torn", **options)
    monkeypatch.setattr(training.run.Training, "_step", step)
    torn, again = train(bert, tmp_path / "torn", **options, resume=True)
    assert all(torch.equal(whole[name], torn[name]) for name in whole)
    assert again["history"] == result["history"] and again["transfer"]["error"] == error
    assert not (tmp_path / "torn" / "transfer").exists()


def test_random_features_of_optimal_variance_are_calibrated(bert, tmp_path):
    weights, _ = train(bert, tmp_path, attention="favor+", attention_options=["variance=optimal"], max_steps=1)
    found = [value for name, value in weights.items() if name.endswith(".rho")]
    assert len(found) == 2 and all((value != 1).all() for value in found)


def test_learning_from_a_softmax_model(bert, tuned, tmp_path, monkeypatch):
    plain, _ = train(bert, tmp_path / "plain", attention="hedgehog")
    taught, _ = train(bert, tmp_path / "taught", attention="hedgehog", distill=tuned, distill_hidden=0.5)
    assert any(not torch.equal(plain[name], taught[name]) for name in plain)
    quiet = []
    monkeypatch.setattr(training.run, "disable_dropout", quiet.append)  # dropout would be noise in the loss
    train(tuned, tmp_path / "self", attention="hedgehog", distill="self", max_steps=1)
    assert len(quiet) == 1
    for fields in ({"distill": "self"}, {"distill": str(tmp_path / "plain" / "model")}, {"distill": "./nowhere"}):
        with pytest.raises(SystemExit):
            train(bert, tmp_path / "wrong", attention="hedgehog", **fields)


def test_after_attention_transfer_the_model_is_its_own_teacher(bert, tuned):
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    device = torch.device("cpu")

    def teacher(model, student=None, **fields):
        options = ClassificationOptions(model=model, attention="hedgehog", **fields)
        return make_teacher(device, student or load(tuned), options)

    assert teacher(tuned, transfer_steps=1).hidden == 1.0
    assert teacher(tuned, transfer_steps=1, distill_hidden=0.5).hidden == 0.5
    assert teacher(tuned) is teacher(tuned, transfer_steps=1, distill="none") is teacher(bert, transfer_steps=1) is None
    for labels in ({"num_labels": 2}, {"id2label": {0: "a", 1: "b", 2: "c"}}):  # of another task
        other = load(tuned, ignore_mismatched_sizes=True, **labels)
        assert teacher(tuned, other, transfer_steps=1) is None


@pytest.mark.parametrize("method", ["tile", "interpolate"])
def test_the_teacher_of_a_patched_model_is_softmax_with_as_many_positions(tuned, tmp_path, method):
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    student, expected = hf_rfattn.patch_model(load(tuned), "average"), load(tuned)
    student.save_pretrained(tmp_path)
    options = ClassificationOptions(model=str(tmp_path), distill="self", max_length=100, extend_positions=method)
    assert choose_length(student, options, 64) == 100
    teacher = make_teacher(torch.device("cpu"), student, options).model
    assert not any(isinstance(module, hf_rfattn.Mechanism) for module in teacher.modules())
    hf_rfattn.extend_positions(expected, 100, method)
    for model in (student, teacher):
        own, table = (m.bert.embeddings.position_embeddings.weight for m in (model, expected))
        assert torch.equal(own, table)


def test_distance_to_the_teacher(tuned):
    """By hand; and a student that is the teacher loses nothing but the task's own loss."""
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    options = ClassificationOptions(
        model=tuned, distill="self", distill_weight=0.25, distill_temperature=3.0, distill_hidden=2.0
    )
    teacher = make_teacher(make_accelerator(options).device, load(tuned), options)
    forget_processes()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"input_ids": torch.randint(4, 20, (2, 4)), "attention_mask": mask, "labels": torch.tensor([0, 2])}
    same = load(tuned).eval()
    torch.testing.assert_close(teacher.loss(same, batch), 0.75 * same(**batch).loss)
    student = hf_rfattn.patch_model(load(tuned).eval(), "average")
    out, exact = (m(**batch, output_hidden_states=True) for m in (student, teacher.model))
    p, q = ((x.logits / 3).softmax(-1) for x in (exact, out))
    divergence = 9 * (p * (p / q).log()).sum(-1).mean()
    rows = mask[..., None]
    hidden = [
        ((a - b) * rows).square().sum() / (b * rows).square().sum()
        for a, b in zip(out.hidden_states[1:], exact.hidden_states[1:], strict=True)
    ]
    expected = 0.75 * out.loss + 0.25 * divergence + 2 * sum(hidden) / len(hidden)
    torch.testing.assert_close(teacher.loss(student, batch), expected)
    assert isinstance(teacher, Teacher) and not any(p.requires_grad for p in teacher.model.parameters())


def test_distance_of_tokens_leaves_out_padding():
    options = ClassificationOptions(distill_temperature=2.0)
    teacher = Teacher(torch.nn.Linear(1, 1), options)
    given, taught, mask = torch.randn(2, 4, 5), torch.randn(2, 4, 5), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    p, q = ((x / 2).softmax(-1) for x in (taught, given))
    expected = 4 * (p * (p / q).log()).sum(-1)[mask.bool()].mean()
    torch.testing.assert_close(teacher._distance(given, taught, mask), expected)


def test_lora(bert, tmp_path):
    """Only small matrices, mechanisms and the head are trained; what is saved is a plain model that gives the same."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3).eval()
    hf_rfattn.patch_model(model, "hedgehog")
    names = set(model.state_dict())
    add_adapters(model, 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(".rf." in name for name in trained) and {"classifier.weight", "classifier.bias"} <= trained
    assert all(".lora_" in name or ".rf." in name or name.startswith("classifier") for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    weights = without_adapters(model, model.state_dict())
    assert set(weights) == names
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3).eval()
    hf_rfattn.patch_model(plain, "hedgehog").load_state_dict(weights)
    batch = {"input_ids": torch.randint(4, 20, (2, 9))}
    torch.testing.assert_close(plain(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)

    base = load_file(f"{bert}/model.safetensors")
    saved, result = train(bert, tmp_path / "lora", attention="hedgehog", lora_rank=2, save_every=2)
    changed = {name for name in base if not torch.equal(saved[f"bert.{name}"], base[name])}
    assert changed and all(name.endswith("weight") and base[name].ndim == 2 for name in changed)
    assert not any("embeddings" in name for name in changed) and result["attention"]["mechanism"] == "hedgehog"
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lora" / "model")
    assert "lora" not in " ".join(loaded.state_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transfer_steps": 5, "attention": "softmax"}, "--transfer-steps needs a mechanism"),
        ({"lora_rank": 0}, "--lora-rank must be above 0"),
    ],
)
def test_options_that_do_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        ClassificationOptions(**{"model": "m"} | fields)
