"""Language modelling: tokens of a text in blocks for training and in windows for evaluation, and perplexity."""

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

PART = 512  # number of tokens whose logits are converted to float32 at a time, to save memory


def load_text(source: Source, split: str, most: int | None = None, column: str = "text") -> Dataset:
    """Load at most `most` lines from the beginning of a split, into the column "text"."""
    lines = source.load(split, [column])
    check_texts(lines, [column])
    return lines.select(range(min(most or len(lines), len(lines)))).rename_columns({column: "text"})


def tokens_of(text: Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokenize all lines and concatenate their tokens."""
    encoded = text.map(
        lambda lines: {"input_ids": tokenizer(lines["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        remove_columns=text.column_names,
        desc="tokens",
    )
    return encoded.data.table.column("input_ids").combine_chunks().flatten().to_numpy()


def split_blocks(tokens: np.ndarray, length: int) -> Dataset:
    """Split tokens into training blocks of equal length. An incomplete block at the end is dropped."""
    count = len(tokens) // length
    if count == 0:
        raise ValueError(
            f"The training text has {len(tokens)} tokens, less than one block of {length}. Give more text, or a "
            "smaller --max-length."
        )
    blocks = tokens[: count * length].reshape(count, length)
    return Dataset.from_dict({"input_ids": list(blocks), "labels": list(blocks)})


def split_windows(tokens: np.ndarray, length: int) -> Dataset:
    """Split tokens into evaluation windows that overlap by one token: all tokens but the first are predicted once.

    >>> split_windows(np.arange(6), length=3)["input_ids"][:]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    if len(tokens) < 2:
        raise ValueError("The evaluation text has fewer than two tokens. Give more text.")
    windows = [tokens[start : start + length] for start in range(0, len(tokens) - 1, length - 1)]
    masks = [np.ones_like(window) for window in windows]
    return Dataset.from_dict({"input_ids": windows, "attention_mask": masks, "labels": windows})


def window_losses(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the negative log-likelihood of each window, summed over its labels, and the number of labels."""
    labels = labels[:, 1:]
    parts = zip(logits[:, :-1].split(PART, dim=1), labels.split(PART, dim=1), strict=True)
    losses = [
        F.cross_entropy(part.flatten(0, 1).float(), x.flatten(), reduction="none").view_as(x) for part, x in parts
    ]
    return {"losses": torch.cat(losses, 1).sum(-1, dtype=torch.float64), "tokens": (labels != -100).sum(-1)}


def perplexity(losses: Sequence[float], tokens: Sequence[int], num_bytes: int | None = None) -> dict[str, Metric]:
    """Compute perplexity from the negative log-likelihood and the number of tokens of each window; with `num_bytes`,
    also bits per byte, which do not depend on the tokenizer.
    """
    total, count = math.fsum(losses), sum(tokens)
    mean = total / count
    found = {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean}
    found |= {"bits_per_byte": total / math.log(2) / num_bytes} if num_bytes else {}
    return {name: Metric(value, count, lower_is_better=True) for name, value in found.items()}
