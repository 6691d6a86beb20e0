"""Language modelling: text as one stream of tokens, in blocks and windows, and perplexity."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_rfattn.results.schema import Metric

from .data import Source, check_texts

PART = 512  # tokens whose logits are looked at in float32 at once: they are large


def load_text(source: Source, split: str, most: int | None = None, column: str = "text") -> Dataset:
    """The first lines of a split, not any: a text has an order."""
    lines = source.load(split, [column])
    check_texts(lines, [column])
    return lines.select(range(min(most or len(lines), len(lines)))).rename_columns({column: "text"})


def tokens_of(text: Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The tokens of all lines, one after the other."""
    encoded = text.map(
        lambda lines: {"input_ids": tokenizer(lines["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        remove_columns=text.column_names,
        desc="tokens",
    )
    return encoded.data.table.column("input_ids").combine_chunks().flatten().to_numpy()


def split_blocks(tokens: np.ndarray, length: int) -> Dataset:
    """For training: blocks of one length. The rest at the end, shorter than a block, is left out."""
    count = len(tokens) // length
    if count == 0:
        raise ValueError(
            f"The training text has {len(tokens)} tokens, less than one block of {length}. Give more text, or a "
            "smaller --max-length."
        )
    blocks = tokens[: count * length].reshape(count, length)
    return Dataset.from_dict({"input_ids": list(blocks), "labels": list(blocks)})


def split_windows(tokens: np.ndarray, length: int) -> Dataset:
    """For evaluation: windows that share one token, so that every token but the very first is predicted once.

    >>> split_windows(np.arange(6), length=3)["input_ids"][:]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    if len(tokens) < 2:
        raise ValueError("The evaluation text has fewer than two tokens. Give more text.")
    windows = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
    masks = [np.ones_like(window) for window in windows]
    return Dataset.from_dict({"input_ids": windows, "attention_mask": masks, "labels": windows})


def window_losses(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Of each window, the negative log-likelihood of the tokens that count, and their number."""
    labels = labels[:, 1:]
    parts = zip(logits[:, :-1].split(PART, dim=1), labels.split(PART, dim=1), strict=True)
    losses = [
        F.cross_entropy(part.flatten(0, 1).float(), x.flatten(), reduction="none").view_as(x) for part, x in parts
    ]
    return {"losses": torch.cat(losses, 1).sum(-1, dtype=torch.float64), "tokens": (labels != -100).sum(-1)}


def perplexity(losses: Sequence[float], tokens: Sequence[int], num_bytes: int | None = None) -> dict[str, Metric]:
    """From the negative log-likelihood of each window and its number of tokens; bits a byte do not depend on the
    tokenizer.
    """
    total, count = math.fsum(losses), sum(tokens)
    mean = total / count
    found = {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean}
    found |= {"bits_per_byte": total / math.log(2) / num_bytes} if num_bytes else {}
    return {name: Metric(value, count, lower_is_better=True) for name, value in found.items()}
