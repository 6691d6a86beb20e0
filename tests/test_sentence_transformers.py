"""Patched SentenceTransformers, and other modules that hold transformers models."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from support.models import ids, tiny_bert
from support.word_tokenizers import save_with_tokenizer
from torch import nn
from typer.testing import CliRunner

from hf_rfattn import (
    attention_error,
    choose_attention,
    convert,
    extend_positions,
    longest_input,
    patch_model,
    unpatch_model,
)
from hf_rfattn.cli import app

TEXTS = ["the cat", "the dog sat on the mat", "dog", "mat and cat", "the cat sat on the dog", "cat and dog"]


@pytest.fixture
def encoder(tmp_path):
    """Mean pooling and normalisation over a tiny BERT, in evaluation mode."""
    torch.manual_seed(0)
    save_with_tokenizer(tiny_bert(), tmp_path / "bert")
    words = modules.Transformer(str(tmp_path / "bert"), max_seq_length=16)
    pooling = modules.Pooling(words.model.config.hidden_size, "mean")
    made = SentenceTransformer(modules=[words, pooling, modules.Normalize()], device="cpu")
    return made.eval()


def embeddings(encoder):
    return encoder.encode(TEXTS, convert_to_tensor=True)


@pytest.mark.parametrize("attention", ["favor+", "hedgehog", "fmm"])
def test_saving_and_loading_is_exact(encoder, tmp_path, attention):
    softmax = embeddings(encoder)
    assert patch_model(encoder, attention) is encoder
    patched = embeddings(encoder)
    assert not torch.equal(softmax, patched)
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert again[0].model.config.rfattn == encoder[0].model.config.rfattn
    assert torch.equal(embeddings(again), patched)
    assert torch.equal(embeddings(unpatch_model(again)), softmax)
    assert torch.equal(embeddings(unpatch_model(encoder)), softmax)


def test_the_command_line_keeps_pooling_and_prompts(encoder, tmp_path):
    encoder[1] = modules.Pooling(encoder[0].model.config.hidden_size, "cls")
    encoder.prompts = {"query": "the mat", "document": ""}
    encoder.save_pretrained(str(tmp_path / "softmax"))
    words = ["patch", str(tmp_path / "softmax"), "favor+", "-o", str(tmp_path / "patched")]
    assert CliRunner().invoke(app, words).exit_code == 0
    again = SentenceTransformer(str(tmp_path / "patched"), device="cpu")
    assert again.prompts == encoder.prompts
    assert torch.equal(embeddings(again), embeddings(patch_model(encoder, "favor+")))


def test_errors_and_choices_are_those_of_the_model_inside(encoder):
    batch = encoder.tokenizer(TEXTS, padding=True, return_tensors="pt")
    inside = encoder[0].model
    choice = choose_attention(encoder, TEXTS, encoder.tokenizer, candidates=["average", "band"])
    assert choice.candidates == choose_attention(inside, batch, candidates=["average", "band"]).candidates
    patch_model(encoder, "favor+", num_features=16)
    expected = attention_error(inside, batch)
    own_inputs = encoder.preprocess(TEXTS)
    for found in (
        attention_error(encoder, batch),
        attention_error(encoder, own_inputs),
        attention_error(encoder, TEXTS, encoder.tokenizer),
    ):
        assert found.overall == expected.overall
        assert all(name.endswith(inner) for name, inner in zip(found.layers, expected.layers, strict=True))


def test_convert_teaches_and_is_saved(encoder, tmp_path):
    report = convert(encoder, "hedgehog", TEXTS, tokenizer=encoder.tokenizer, steps=20, batch_size=3, progress=False)
    assert sum(report.after.overall) < sum(report.before.overall)
    taught = embeddings(encoder)
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(embeddings(again), taught)


def test_extended_positions_are_used_and_saved(encoder, tmp_path):
    limit = longest_input(encoder)
    short = embeddings(encoder)
    extend_positions(encoder, 2 * limit, method="tile")
    assert encoder.max_seq_length == longest_input(encoder) == 2 * limit
    assert torch.equal(embeddings(encoder), short)
    long_text = "cat mat " * limit
    found = encoder.encode(long_text, convert_to_tensor=True)
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert again.max_seq_length == 2 * limit
    assert torch.equal(again.encode(long_text, convert_to_tensor=True), found)
    assert not torch.equal(again.encode("cat mat " * (limit // 2), convert_to_tensor=True), found)


class TwoTowers(nn.Module):
    """Two models that take their inputs as one dict."""

    def __init__(self):
        super().__init__()
        self.question, self.answer = tiny_bert(), tiny_bert()

    def forward(self, features):
        return self.question(**features).last_hidden_state, self.answer(**features).last_hidden_state


class Keywords(nn.Module):
    """A model that changes its inputs."""

    def __init__(self):
        super().__init__()
        self.body = tiny_bert()

    def forward(self, input_ids, shift=0):
        return self.body(input_ids=input_ids + shift)


def test_other_modules_that_hold_models():
    towers = patch_model(TwoTowers(), "favor+", num_features=16)
    batch = {"input_ids": ids(), "unknown": "text"}
    names = attention_error(towers, batch).layers
    assert {name.split(".")[0] for name in names} == {"question", "answer"}

    tokens = ids().clamp(max=48)
    wrapped = patch_model(Keywords(), "favor+", num_features=16)
    shifted = attention_error(wrapped, {"input_ids": tokens, "shift": 1}).overall
    assert shifted == attention_error(wrapped.body, {"input_ids": tokens + 1}).overall
