"""What attention transfer is trained on: batches without end, or texts that become such."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .processes import process_count, process_rank


class TrainingBatches:
    """What is trained on, as mappings, without end."""

    def __init__(
        self,
        given: Iterable[Mapping[str, Any]] | Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
        batch_size: int,
        max_length: int,
        seed: int,
    ):
        if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
            raise ValueError(f"batches must be several batches or several texts, not one {type(given).__name__}.")
        self.given: Iterable[Any] = given
        if isinstance(given, Sequence) and given and isinstance(given[0], str):
            if tokenizer is None:
                raise ValueError("batches are texts: give their tokenizer too.")
            self.given = _Texts(given, tokenizer, batch_size, max_length, seed)
        elif tokenizer is not None:
            raise ValueError("tokenizer is for texts, but batches are not a list of texts.")
        self.once = isinstance(self.given, Iterator)
        self.skipped = 0

    def take_first(self) -> Mapping[str, Any]:
        """The first batch, which is not trained on."""
        if isinstance(self.given, _Texts):
            return self.given.take_first()
        self.skipped = 0 if self.once else 1
        for batch in self.given:
            return batch
        raise ValueError("batches is empty.")

    def from_step(self, step: int) -> Iterator[Mapping[str, Any]]:
        """Batch number `step` and all that follow."""
        number = 0
        while True:
            before = number
            for batch in itertools.islice(self.given, self.skipped, None):
                if number >= step:
                    yield batch
                number += 1
            if self.once or number == before:
                raise ValueError(
                    f"batches came to an end after {number} steps. Give more of them"
                    + (", or a list or DataLoader, which can be gone through again." if self.once else ".")
                )


class _Texts:
    """Texts in batches, in a new order each time, which depends on the seed alone; processes share each batch."""

    def __init__(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, batch_size: int, max_length: int, seed: int
    ):
        self.texts, self.tokenizer, self.batch_size, self.max_length = list(texts), tokenizer, batch_size, max_length
        self.dice = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(texts), generator=self.dice).tolist()
        self.texts = [texts[i] for i in order]

    def take_first(self) -> Mapping[str, Any]:
        first, self.texts = self.texts[: self.batch_size], self.texts[self.batch_size :]
        return self._encode(first)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        order = torch.randperm(len(self.texts), generator=self.dice).tolist()
        step = self.batch_size * process_count()
        for start in range(0, len(order) - step + 1, step):
            yield self._encode([self.texts[i] for i in order[start + process_rank() : start + step : process_count()]])

    def _encode(self, texts: list[str]) -> Mapping[str, Any]:
        return self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
