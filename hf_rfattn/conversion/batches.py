"""What attention transfer is trained on: batches without end, or texts that become such."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..integration.inputs import Batch, Data, as_batches, encode, texts_in
from .processes import process_count, process_rank


class TrainingBatches:
    """What is trained on, as mappings, without end: call `take_first`, if need be, and then iterate."""

    def __init__(self, given: Data, tokenizer: Any, batch_size: int, max_length: int, seed: int):
        texts = texts_in(given, tokenizer)
        self.given: Iterable[Batch] = (
            as_batches(given) if texts is None else _Texts(texts, tokenizer, batch_size, max_length, seed)
        )
        self.once = isinstance(self.given, Iterator)
        self.skipped = 0

    def take_first(self) -> Batch:
        """The first batch, which is not trained on unless it is the only one."""
        if isinstance(self.given, _Texts):
            return self.given.take_first()
        batches = iter(self.given)
        for batch in batches:
            self.skipped = 0 if self.once else len(list(itertools.islice(batches, 1)))
            return batch
        raise ValueError("There is no batch to train on: what was given is empty.")

    def __iter__(self) -> Iterator[Batch]:
        count = 0
        while True:
            before = count
            for batch in itertools.islice(self.given, self.skipped, None):
                count += 1
                yield batch
            if self.once or count == before:
                raise ValueError(
                    f"batches came to an end after {count} steps. Give more of them"
                    + (", or a list or DataLoader, which can be gone through again." if self.once else ".")
                )


class _Texts:
    """Texts in batches, in a new order each time, which depends on the seed alone; processes share each batch."""

    def __init__(self, texts: list[str], tokenizer: Any, batch_size: int, max_length: int, seed: int):
        if len(texts) < process_count():
            raise ValueError(f"{len(texts)} texts cannot be shared by {process_count()} processes. Give more texts.")
        self.tokenizer, self.batch_size, self.max_length = tokenizer, batch_size, max_length
        self.step = batch_size * process_count()  # texts a step sees, over all processes
        self.dice = torch.Generator().manual_seed(seed)
        self.texts = [texts[i] for i in torch.randperm(len(texts), generator=self.dice).tolist()]

    def take_first(self) -> Batch:
        """The first batch, which is not trained on if another one is left."""
        first = self.texts[: self.batch_size]
        if len(self.texts) - len(first) >= self.step:
            self.texts = self.texts[self.batch_size :]
        return encode(first, self.tokenizer, self.max_length)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.texts), generator=self.dice).tolist()
        step = min(self.step, len(order))
        for start in range(0, len(order) - step + 1, step):
            share = order[start + process_rank() : start + step : process_count()]
            yield encode([self.texts[i] for i in share], self.tokenizer, self.max_length)
