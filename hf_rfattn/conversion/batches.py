"""Training data of attention transfer: an endless stream of batches, from batches or texts."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..integration.inputs import Batch, Data, as_batches, encode, texts_in
from .processes import process_count, process_rank


class TrainingBatches:
    """An endless iterable of batches. If needed, call `take_first` before iterating."""

    def __init__(self, given: Data, tokenizer: Any, batch_size: int, max_length: int, seed: int):
        texts = texts_in(given, tokenizer)
        self.given: Iterable[Batch] = as_batches(given) if texts is None else []
        if texts is not None:
            if len(texts) < process_count():
                raise ValueError(f"{len(texts)} texts are too few for {process_count()} processes; give more texts.")
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
            share: Any = [texts[i] for i in order[process_rank() :: process_count()]]
            collate = partial(encode, tokenizer=tokenizer, max_length=max_length)
            self.given = DataLoader(share, batch_size, drop_last=len(share) > batch_size, collate_fn=collate)
        self.once = isinstance(self.given, Iterator)
        self.skipped = 0

    def take_first(self) -> Batch:
        """Return the first batch, which is then left out of training unless it is the only one."""
        batches = iter(self.given)
        for batch in batches:
            self.skipped = 0 if self.once else len(list(itertools.islice(batches, 1)))
            return batch
        raise ValueError("batches is empty; give at least one batch or text.")

    def __iter__(self) -> Iterator[Batch]:
        count = 0
        while True:
            before = count
            for batch in itertools.islice(self.given, self.skipped, None):
                count += 1
                yield batch
            if self.once or count == before:
                raise ValueError(
                    f"batches ended after {count} steps. Give more batches"
                    + (", or a list or DataLoader, which can be iterated repeatedly." if self.once else ".")
                )
