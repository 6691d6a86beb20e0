"""Tokenizers of a few words each."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = "the cat sat on the mat and the dog sat on the cat"


def word_level(words):
    """One token a word; "[UNK]" must be among them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def tiny_tokenizer(words=("good", "bad", "film", "the")):
    tokenizer = word_level(["[PAD]", "[UNK]", *words])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def save_with_tokenizer(model, folder):
    """A model beside a tokenizer that knows the words of `TEXT`; returns the folder."""
    tiny_tokenizer(sorted(set(TEXT.split()))).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
