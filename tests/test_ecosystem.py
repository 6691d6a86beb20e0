"""Patched models in the hands of the ecosystem: checkpointing, compile, copies, dtypes, PEFT, Trainer, pipeline,
accelerate.
"""

import copy
import pickle
import threading

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from support.models import MODELS, gradients, hidden, ids, tiny_bert, tiny_gpt2, tiny_llama
from support.variants import every_mechanism
from support.word_tokenizers import tiny_tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from hf_rfattn import attention_error, calibrate, patch_model, unpatch_model
from hf_rfattn.features.maps import RandomFeatures

every_model = pytest.mark.parametrize("family", MODELS)


def classifier():
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=2,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


@every_model
@every_mechanism
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, variant, reentrant):
    model = patch_model(MODELS[family](), variant[0]).train()
    tokens = ids(2, 70)
    out, expected = gradients(model, input_ids=tokens, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again, checkpointed = gradients(model, input_ids=tokens, use_cache=False)
    torch.testing.assert_close(out, again)
    assert expected.keys() == checkpointed.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grad, checkpointed[name])


@every_model
@every_mechanism
def test_deepcopy_and_pickle(family, variant):
    model = patch_model(MODELS[family](), variant[0])
    tokens = ids(2, 70)
    expected = hidden(model, input_ids=tokens)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(twin, input_ids=tokens), expected)
        with pytest.raises(ValueError, match="output_attentions"):
            twin(input_ids=tokens, output_attentions=True)
        unpatch_model(twin)
        same = torch.allclose(hidden(twin, input_ids=tokens), expected)
        assert not same or variant[0] == "multipole"  # which is softmax up to `exact_keys` tokens
    assert torch.equal(hidden(model, input_ids=tokens), expected)


@every_model
@every_mechanism
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models(family, variant, dtype):
    model = patch_model(MODELS[family](), variant[0])
    tokens, mask = ids(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[1, 50:] = 0
    expected = hidden(model, input_ids=tokens, attention_mask=mask)
    model.half() if dtype == torch.float16 else model.to(dtype)
    out = hidden(model, input_ids=tokens, attention_mask=mask)
    assert out.dtype == dtype and torch.isfinite(out).all()
    assert (out.float() - expected)[mask == 1].norm() / expected[mask == 1].norm() < 0.05
    out.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_mechanism
def test_autocast_training(variant):
    model = patch_model(tiny_gpt2(), variant[0]).train()
    tokens = ids(2, 70)
    expected = hidden(model, input_ids=tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hidden(model, input_ids=tokens)
    out.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert (out.float() - expected).norm() / expected.norm() < 0.05


def test_lora_with_the_mechanisms_saved(tmp_path):
    """`modules_to_save=["rf"]`: mechanisms are trained, stored in the adapter, and come back with it."""
    base = tiny_gpt2()
    state = {k: v.clone() for k, v in base.state_dict().items()}
    adapter = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["rf"], fan_in_fan_out=True)
    model = get_peft_model(patch_model(base, "hedgehog"), adapter)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("rf.modules_to_save" in n and "query_weight" in n for n in trainable)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    tokens = ids(2, 70)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.eval()
    expected = hidden(model, input_ids=tokens)
    model.save_pretrained(tmp_path)

    from peft import PeftModel

    fresh = tiny_gpt2()
    fresh.load_state_dict(state)
    again = PeftModel.from_pretrained(patch_model(fresh, "hedgehog"), tmp_path).eval()
    torch.testing.assert_close(hidden(again, input_ids=tokens), expected)


def test_trainer_trains_the_mechanisms(tmp_path):
    model = patch_model(classifier(), "fmm", bandwidth=4, far=("hedgehog",), global_tokens=0)
    data = [{"input_ids": ids(1, 20)[0], "labels": i % 2} for i in range(16)]
    before = {n: p.clone() for n, p in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no", use_cpu=True,
        learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    result = Trainer(model, arguments, train_dataset=data).train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if ".rf." in n} <= changed


def test_pipeline():
    model = patch_model(classifier(), "favor+").eval()
    classify = pipeline("text-classification", model=model, tokenizer=tiny_tokenizer(), device="cpu")
    texts = ["the good film", "bad", "the the the bad film film"]
    batched = classify(texts, batch_size=3, padding=True)
    for one, many in zip([classify(t)[0] for t in texts], batched, strict=True):
        assert one["label"] == many["label"] and one["score"] == pytest.approx(many["score"], abs=1e-5)


def test_accelerate_prepare():
    accelerator = Accelerator(cpu=True)
    model = patch_model(classifier(), "favor+")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        [{"input_ids": ids(1, 20)[0], "labels": i % 2} for i in range(8)], batch_size=4
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    unwrapped = accelerator.unwrap_model(model)
    assert torch.isfinite(hidden(unwrapped, input_ids=ids(1, 20))).all()


def test_threads_share_one_model():
    model = patch_model(tiny_llama(), "fmm", bandwidth=5)
    batches = [(ids(2, 30 + 7 * n), torch.randint(0, 2, (2, 30 + 7 * n))) for n in range(4)]
    with torch.no_grad():
        expected = [hidden(model, input_ids=t, attention_mask=m) for t, m in batches]
        results = [[] for _ in batches]

        def work(n):
            with torch.no_grad():
                for _ in range(5):
                    results[n].append(hidden(model, input_ids=batches[n][0], attention_mask=batches[n][1]))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    for reference, outs in zip(expected, results, strict=True):
        assert len(outs) == 5 and all(torch.equal(reference, out) for out in outs)


# --- what is refused -------------------------------------------------------------------------------------------------


@every_model
def test_output_attentions_and_head_mask_are_refused(family):
    model = patch_model(MODELS[family](), "favor+")
    with pytest.raises(ValueError, match="no L × L matrix"):
        model(input_ids=ids(2, 70), output_attentions=True)
    with pytest.raises(ValueError, match="head_mask"):
        model(input_ids=ids(2, 70), head_mask=torch.ones(2, 4))
    model.set_attn_implementation("eager")
    assert len(model(input_ids=ids(2, 70), output_attentions=True).attentions) == 2
    with pytest.raises(ValueError, match=r"config\.output_attentions"):
        unpatch_model(model).config.output_attentions = True
        patch_model(model, "favor+")


@every_model
def test_masks_of_pairs_are_refused(family):
    model = patch_model(MODELS[family](), "favor+")
    for mask in (torch.ones(2, 1, 70, 70, dtype=torch.bool), torch.zeros(2, 1, 70, 70)):
        with pytest.raises(NotImplementedError, match="2D attention_mask"):
            model(input_ids=ids(2, 70), attention_mask=mask)


@every_model
def test_an_unpatched_model_with_our_name_is_told_so(family):
    model = MODELS[family]()
    model.set_attn_implementation("hf_rfattn")
    with pytest.raises(ValueError, match=r"was not patched.*patch_model"):
        model(input_ids=ids(2, 70))


# --- errors, calibration ---------------------------------------------------------------------------------------------


@every_model
def test_attention_error_is_measured_against_softmax(family):
    model = MODELS[family]()
    tokens, mask = ids(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[1, 40:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    with pytest.raises(ValueError, match="not patched"):
        attention_error(model, batch)
    perfect = attention_error(patch_model(model, "band", bandwidth=100), batch)
    assert len(perfect.layers) == 2 and all(len(h) == 4 for h in perfect.heads)
    assert max(perfect.overall) < 1e-5 < min(perfect.average)
    nothing = attention_error(patch_model(model, "average"), batch)
    assert nothing.overall == pytest.approx(nothing.average) and nothing.average == pytest.approx(perfect.average)
    mixed = attention_error(patch_model(model, {0: "average", 1: "band"}), batch)
    assert mixed.mechanisms == ["average", "band"]
    # the layer above an approximate one is judged on the original model's q, k, v
    assert mixed.average == pytest.approx(perfect.average, rel=1e-4)
    assert "average" in str(mixed) and str(mixed).count("\n") == 3
    assert mixed.to_dict()["overall"] == mixed.overall
    with pytest.raises(ValueError, match="keyword arguments"):
        attention_error(model, tokens)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="no patched layer"):
        attention_error(model, batch)


def test_attention_error_of_texts_batches_and_one_batch():
    model, tokenizer = patch_model(tiny_bert(), "average", layers=[1]), tiny_tokenizer()
    texts = ["the good film", "bad", "the the the bad film film", "good bad good bad"]
    pairs = [tokenizer(texts[i : i + 2], padding=True, return_tensors="pt") for i in (0, 2)]
    expected = attention_error(model, pairs)
    for same in (
        attention_error(model, iter(pairs)),
        attention_error(model, texts, tokenizer),
        attention_error(model, tuple(texts), tokenizer, batch_size=2),
        attention_error(model, tokenizer(texts, padding=True, return_tensors="pt")),
    ):
        assert same.overall == pytest.approx(expected.overall, rel=1e-4)
    one = tokenizer(texts[2], return_tensors="pt")
    assert attention_error(model, texts[2], tokenizer).overall == attention_error(model, one).overall
    cut = tokenizer(texts[2], truncation=True, max_length=3, return_tensors="pt")
    assert attention_error(model, texts[2], tokenizer, max_length=3).overall == attention_error(model, cut).overall
    with pytest.raises(ValueError, match="give their tokenizer"):
        attention_error(model, texts)


def test_attention_error_by_hand():
    """One layer, one batch: the number is ‖ô - o‖ / ‖o‖ over valid positions of each head."""
    model = tiny_bert(num_hidden_layers=1)
    tokens, mask = ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, 10:] = 0
    captured = {}

    def grab(name):
        return lambda module, args, kwargs, out: captured.__setitem__(name, out[0])

    attention = model.encoder.layer[0].attention.self
    handle = attention.register_forward_hook(grab("exact"), with_kwargs=True)
    model(input_ids=tokens, attention_mask=mask)
    handle.remove()
    patch_model(model, "favor+")
    handle = attention.register_forward_hook(grab("patched"), with_kwargs=True)
    model(input_ids=tokens, attention_mask=mask)
    handle.remove()
    exact, patched = (captured[n].view(2, 30, 4, 8)[mask == 1] for n in ("exact", "patched"))
    expected = ((patched - exact).square().sum((0, 2)) / exact.square().sum((0, 2))).sqrt()
    error = attention_error(model, {"input_ids": tokens, "attention_mask": mask})
    assert error.heads[0] == pytest.approx(expected.tolist(), rel=1e-4)
    assert not model.training


def test_calibration():
    model = patch_model(tiny_llama(), "favor+", variance="optimal")
    batch = {"input_ids": ids(2, 70)}
    before = hidden(model, **batch)
    maps = [m for m in model.modules() if isinstance(m, RandomFeatures)]
    assert all((m.rho == 1).all() for m in maps)
    assert calibrate(model, batch) is model
    assert all((m.rho > 0).all() and not (m.rho == 1).any() for m in maps)
    assert not torch.equal(before, hidden(model, **batch))
    with pytest.raises(ValueError, match="variance='optimal'"):
        calibrate(patch_model(model, "favor+"), batch)
