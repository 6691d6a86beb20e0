"""The training loop: what changes the weights and what must not, the best model, stopping, going on."""

import itertools
import json

import finetune_glue
import finetune_snli
import pytest
import torch
import training.run
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from support import sample
from support.recipes import forget_processes, make_bert, run_here
from training.classification import ClassificationOptions
from training.models import disable_dropout, make_optimizer, mechanism_parameters, rate_factor
from training.options import RunOptions
from training.session import Session, in_session

import hf_rfattn

SNLI = (finetune_snli.SnliTask, ClassificationOptions)
QUICK = {"data": "sample", "max_train_samples": 64, "max_eval_samples": 37, "max_steps": 6, "batch_size": 8}
QUICK |= {"learning_rate": 1e-3, "eval_batch_size": 16}


def train(model, output, **fields):
    """(weights, result) of a run."""
    result = run_here(*SNLI, model=model, output=str(output), **{**QUICK, **fields})
    return load_file(output / "model" / "model.safetensors"), result


def close(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def test_no_dropout():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=9, attention_dropout=0.5)).train()
    bert = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=9)).train()
    tokens = torch.arange(8)[None]
    for model in (llama, bert):
        assert not torch.equal(model(tokens).last_hidden_state, model(tokens).last_hidden_state)
        disable_dropout(model)
        assert torch.equal(model(tokens).last_hidden_state, model(tokens).last_hidden_state)


def test_training_without_dropout(tmp_path):
    """A run with dropout in its config and --no-dropout gives the weights of a run without dropout."""
    plain = make_bert(tmp_path / "plain", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    dropping = make_bert(tmp_path / "dropping", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    expected, _ = train(plain, tmp_path / "expected")
    found, _ = train(dropping, tmp_path / "found", no_dropout=True)
    close(expected, found)
    other, _ = train(dropping, tmp_path / "other")
    assert any(not torch.equal(expected[name], other[name]) for name in expected)


def test_what_must_not_change_the_weights(bert, tmp_path):
    """Passes, activations computed twice, evaluation, states, readings of the loss."""
    options = {"attention": "favor+", "redraw_every": 2}
    plain, result = train(bert, tmp_path / "plain", **options)
    again, _ = train(
        bert, tmp_path / "again", **options, evaluate_every=1, save_every=2, log_every=1, eval_batch_size=5
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    passes, in_passes = train(bert, tmp_path / "passes", **options, accumulate=4)
    close(plain, passes, rtol=1e-3, atol=1e-5)
    losses = [found["history"][-1]["train_loss"] for found in (result, in_passes)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    twice, _ = train(bert, tmp_path / "twice", **options, gradient_checkpointing=True)
    close(plain, twice, rtol=1e-3, atol=1e-5)
    other, _ = train(bert, tmp_path / "other", **options, seed=1)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)
    draws = {name: int(value) for name, value in plain.items() if name.endswith("draws")}
    assert draws and set(draws.values()) == {2}  # before steps 2 and 4
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=3)
    hf_rfattn.patch_model(model, "favor+", seed=0)
    hf_rfattn.redraw(hf_rfattn.redraw(model))
    fresh = model.state_dict()
    assert all(torch.equal(plain[name], fresh[name]) for name in plain if name.endswith("projection"))
    assert result["history"][-1]["step"] == 6


def test_one_step_by_hand(bert, tmp_path):
    """A step is AdamW on the mean loss of the batch, gradients clipped, at the rate of the schedule."""
    found, _ = train(
        bert, tmp_path, attention="hedgehog", max_steps=1, warmup=0, max_gradient_norm=0.1, weight_decay=0.3
    )
    forget_processes()
    options = ClassificationOptions(
        model=bert, attention="hedgehog", output=str(tmp_path), weight_decay=0.3, **{**QUICK, "max_steps": 1}
    )
    options.data = sample.folder("snli")
    made = training.run.Training(Session(options, Accelerator(cpu=True), {}), finetune_snli.SnliTask(options))
    forget_processes()
    batch = made.prepared.collate([made.prepared.train[i] for i in next(made.order.batches(0))])
    model = made.model.train()
    optimizer = make_optimizer(model, options)
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    close(found, model.state_dict(), rtol=1e-5, atol=1e-7)


def test_groups_of_the_optimizer(bert):
    model = hf_rfattn.patch_model(transformers.BertModel.from_pretrained(bert), "hedgehog", layers=[1])
    own = mechanism_parameters(model)
    assert own and all(".layer.1." in name and ".rf." in name for name in own)
    optimizer = make_optimizer(model, RunOptions(model="m", learning_rate=1e-4, mechanism_learning_rate=1e-2))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert set().union(*(g[0] for g in groups)) == set(names.values())
    (matrices, rate, decay), (vectors, _, none), (mechanisms, fast, zero) = groups
    assert (rate, decay, none, fast, zero) == (1e-4, 0.01, 0.0, 1e-2, 0.0) and mechanisms == own
    assert all(name.endswith("weight") and "LayerNorm" not in name for name in matrices)
    assert all(name.endswith("bias") or "LayerNorm" in name for name in vectors)
    with pytest.raises(ValueError, match="has no parameters"):
        make_optimizer(transformers.BertModel.from_pretrained(bert), RunOptions(model="m", mechanism_learning_rate=1.0))


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 0.1, 5])
def test_schedules(scheduler, warmup):
    rates = [rate_factor(step, 50, warmup, scheduler) for step in range(50)]
    ramp = {0: 0, 0.1: 5, 5: 5}[warmup]
    assert max(rates) == 1.0 and min(rates) > 0
    assert rates[:ramp] == pytest.approx([(i + 1) / 5 for i in range(ramp)])
    after = rates[ramp:]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert after[-1] == 1 if scheduler == "constant" else after[-1] < 0.05


def test_the_best_model_is_kept(bert, tmp_path, monkeypatch):
    """Scores are made up here: the second evaluation is the best; its weights are those of a run that ends there."""
    scores = iter([0.4, 0.9, 0.5])
    original = finetune_snli.SnliTask.score

    def score(self, split, predictions):
        (metric,) = original(self, split, predictions).values()
        return {"accuracy": type(metric)(next(scores), metric.n, 1)}

    monkeypatch.setattr(finetune_snli.SnliTask, "score", score)
    best, result = train(bert, tmp_path / "best", evaluate_every=2, keep="best", scheduler="constant", warmup=0)
    assert result["kept_step"] == 4 and result["metrics"]["accuracy"]["value"] == 0.9 and result["steps_done"] == 6
    monkeypatch.setattr(finetune_snli.SnliTask, "score", original)
    short, _ = train(bert, tmp_path / "short", max_steps=4, evaluate_every=2, scheduler="constant", warmup=0)
    assert all(torch.equal(best[name], short[name]) for name in best)


def test_early_stop(bert, tmp_path):
    """Nothing is learnt at such a rate, so the first evaluation stays the best."""
    options = {"max_steps": 30, "evaluate_every": 2, "early_stop": 3, "learning_rate": 1e-12, "save_every": 50}
    _, result = train(bert, tmp_path, **options)
    assert result["stopped_early"] and result["steps_done"] == 8 and result["kept_step"] == 2
    assert [entry["step"] for entry in result["history"]] == [2, 4, 6, 8]
    assert result["budget"]["steps"] == 30


def test_a_run_that_breaks_off_goes_on(bert, tmp_path, monkeypatch):
    options = {"attention": "favor+", "redraw_every": 2, "save_every": 2, "evaluate_every": 3, "keep": "best"}
    whole, expected = train(bert, tmp_path / "whole", **options)
    step = training.run.Training._step

    def breaks(self, batches):
        if self.progress.step == 5:
            raise KeyboardInterrupt
        step(self, batches)

    monkeypatch.setattr(training.run.Training, "_step", breaks)
    with pytest.raises(SystemExit):
        train(bert, tmp_path / "torn", **options)
    assert [p.name for p in (tmp_path / "torn" / "state").iterdir()] == ["step-00000004"]
    monkeypatch.setattr(training.run.Training, "_step", step)
    with pytest.raises(SystemExit):
        train(bert, tmp_path / "torn", **options)  # neither --resume nor --overwrite
    with pytest.raises(SystemExit):
        train(bert, tmp_path / "torn", **{**options, "redraw_every": 3}, resume=True)
    torn, result = train(bert, tmp_path / "torn", **{**options, "save_every": 100}, resume=True)
    assert all(torch.equal(whole[name], torn[name]) for name in whole)
    assert result["history"] == expected["history"] and result["metrics"] == expected["metrics"]
    created = json.loads((tmp_path / "torn" / "result.json").read_text())["created"]
    assert train(bert, tmp_path / "torn", **options, resume=True)[1]["created"] == created  # finished: nothing is done
    again, _ = train(bert, tmp_path / "torn", **options, overwrite=True)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_mixed_precision(bert, tmp_path):
    weights, result = train(bert, tmp_path, attention="favor+", mixed_precision="bf16")
    assert result["mixed_precision"] == "bf16"
    assert all(torch.isfinite(w).all() and w.dtype != torch.bfloat16 for w in weights.values())


def test_features_that_want_calibration_get_it(bert, tmp_path):
    weights, _ = train(bert, tmp_path, attention="favor+", attention_options=["variance=optimal"])
    rho = [value for name, value in weights.items() if name.endswith("rho")]
    assert rho and all((value != 1).all() for value in rho)


def test_a_loss_that_explodes_is_told(bert, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(bert, tmp_path, learning_rate=1e30, max_gradient_norm=0, log_every=2, max_steps=20)
    assert "The loss became nan before step 2. Try a lower --learning-rate" in capsys.readouterr().err


def test_tensorboard(bert, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = finetune_glue.GlueOptions(
        model=bert, task="rte", report_to="tensorboard", output=str(tmp_path), log_every=2, **QUICK
    )
    forget_processes()
    options.data = sample.folder("rte")
    in_session(options, "task", lambda session: training.run.train(session, finetune_glue.GlueTask(options)))
    forget_processes()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*") if path.parent.name == "hf-rfattn"}
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [6]
