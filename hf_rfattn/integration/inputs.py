"""What a user has to run a model on, as batches: texts with their tokenizer, batches, or one batch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

Batch: TypeAlias = Mapping[str, Any]
Data: TypeAlias = Batch | Iterable[Batch] | str | Sequence[str]


def as_batches(
    data: Data, tokenizer: PreTrainedTokenizerBase | None = None, *, batch_size: int = 16, max_length: int = 512
) -> Iterable[Batch]:
    """Batches to go through: texts are encoded, `batch_size` at a time; one batch becomes a list of one; an iterable of
    batches is returned as it is.

    >>> as_batches({"input_ids": [[1, 2]]})
    [{'input_ids': [[1, 2]]}]
    """
    texts = texts_in(data, tokenizer)
    if texts is not None:
        starts = range(0, len(texts), batch_size)
        return [encode(texts[start : start + batch_size], tokenizer, max_length) for start in starts]
    return [data] if isinstance(data, Mapping) else data  # type: ignore[return-value]


def texts_in(data: Data, tokenizer: PreTrainedTokenizerBase | None) -> list[str] | None:
    """The texts, one or several, which need a tokenizer; None for batches."""
    first = data[0] if isinstance(data, Sequence) and len(data) else None
    if isinstance(first, str):
        if tokenizer is None:
            raise ValueError("These are texts: give their tokenizer too, as tokenizer=...")
        return [data] if isinstance(data, str) else list(data)  # type: ignore[arg-type]
    if isinstance(data, str) or not isinstance(data, Iterable):
        given = "an empty text" if isinstance(data, str) else type(data).__name__
        raise ValueError(f"Give texts with their tokenizer, batches as a tokenizer returns them, or one; not {given}.")
    return None


def encode(texts: list[str], tokenizer: Any, max_length: int) -> Batch:
    """Texts as one batch, cut at `max_length` tokens or at what the tokenizer allows, and padded."""
    length = min(max_length, tokenizer.model_max_length)
    return tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
