"""Converts user data to batches: texts with a tokenizer, an iterable of batches, or one batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

Batch: TypeAlias = Mapping[str, Any]
Data: TypeAlias = Batch | Iterable[Batch] | str | Sequence[str]


def as_batches(
    data: Data, tokenizer: PreTrainedTokenizerBase | None = None, *, batch_size: int = 16, max_length: int = 512
) -> Iterable[Batch]:
    """Convert data to batches. Texts are encoded `batch_size` at a time, one batch becomes a list of one, and an
    iterable of batches is returned unchanged.

    >>> as_batches({"input_ids": [[1, 2]]})
    [{'input_ids': [[1, 2]]}]
    """
    texts = texts_in(data, tokenizer)
    if texts is not None:
        starts = range(0, len(texts), batch_size)
        return [encode(texts[start : start + batch_size], tokenizer, max_length) for start in starts]
    return [data] if isinstance(data, Mapping) else data  # type: ignore[return-value]


def texts_in(data: Data, tokenizer: PreTrainedTokenizerBase | None) -> list[str] | None:
    """Return a list of texts if the data are texts, which need a tokenizer, or None if they are batches."""
    first = data[0] if isinstance(data, Sequence) and len(data) else None
    if isinstance(first, str):
        if tokenizer is None:
            raise ValueError("The data are texts: give their tokenizer too, as tokenizer=...")
        return [data] if isinstance(data, str) else list(data)  # type: ignore[arg-type]
    if isinstance(data, str) or not isinstance(data, Iterable):
        given = "an empty text" if isinstance(data, str) else type(data).__name__
        raise ValueError(f"Give texts with their tokenizer, or batches as a tokenizer returns them, not {given}.")
    return None


def encode(texts: list[str], tokenizer: Any, max_length: int) -> Batch:
    """Encode texts as one padded batch, truncated to `max_length` tokens or the tokenizer's limit."""
    length = min(max_length, tokenizer.model_max_length)
    return tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
