"""What attention transfer is trained on: batches without end, or texts that become such."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..integration.inputs import Batch, Data, as_batches, encode, texts_in
from .processes import gather, process_count, process_rank


class TrainingBatches:
    """What is trained on, as mappings, without end: call `take_first`, if need be, and then `next`."""

    def __init__(
        self,
        given: Data,
        tokenizer: PreTrainedTokenizerBase | None,
        batch_size: int,
        max_length: int,
        seed: int,
    ):
        texts = texts_in(given, tokenizer)
        self.given: Iterable[Batch] = (
            as_batches(given) if texts is None else _Texts(texts, tokenizer, batch_size, max_length, seed)
        )
        self.once = isinstance(self.given, Iterator)
        self.skipped = 0
        self.count = 0  # batches that were taken
        self._digest = 0  # of these
        self._endless = self._without_end()

    def take_first(self) -> Batch:
        """The first batch, which is not trained on unless it is the only one."""
        if isinstance(self.given, _Texts):
            return self.given.take_first()
        batches = iter(self.given)
        for batch in batches:
            self.skipped = 0 if self.once else len(list(itertools.islice(batches, 1)))
            return batch
        raise ValueError("There is no batch to train on: what was given is empty.")

    def next(self) -> Batch:
        batch = next(self._endless)
        self._digest += digest(batch, self.count)
        self.count += 1
        return batch

    def skip(self, count: int) -> None:
        for _ in range(count):
            self.next()

    def digest(self) -> str:
        """Of all batches taken so far, on all processes: equal for equal batches in equal order, however processes
        share each of them and whatever padding it has.
        """
        return f"{sum(gather(self._digest)) % 2**64:016x}"

    def _without_end(self) -> Iterator[Batch]:
        while True:
            before = self.count
            yield from itertools.islice(self.given, self.skipped, None)
            if self.once or self.count == before:
                raise ValueError(
                    f"batches came to an end after {self.count} steps. Give more of them"
                    + (", or a list or DataLoader, which can be gone through again." if self.once else ".")
                )


def digest(batch: Mapping[str, Any], step: int) -> int:
    """A number for the batch of a step: the sum over the rows of its tensors, without padding."""
    mask = batch.get("attention_mask")
    total = 0
    for name, value in batch.items():
        if isinstance(value, Tensor):
            padded = isinstance(mask, Tensor) and mask.ndim == 2 and value.shape[:2] == mask.shape
            for i, row in enumerate(value if value.ndim else value[None]):
                part = row[mask[i] > 0] if padded and mask is not None else row
                hashed = hashlib.blake2b(f"{step} {name} {part.dtype}\0".encode() + tensor_bytes(part), digest_size=8)
                total += int.from_bytes(hashed.digest(), "big")
    return total


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


class _Texts:
    """Texts in batches, in a new order each time, which depends on the seed alone; processes share each batch."""

    def __init__(
        self,
        texts: list[str],
        tokenizer: PreTrainedTokenizerBase | None,
        batch_size: int,
        max_length: int,
        seed: int,
    ):
        if len(texts) < process_count():
            raise ValueError(f"{len(texts)} texts cannot be shared by {process_count()} processes. Give more texts.")
        self.tokenizer, self.batch_size, self.max_length = tokenizer, batch_size, max_length
        self.dice = torch.Generator().manual_seed(seed)
        self.texts = [texts[i] for i in torch.randperm(len(texts), generator=self.dice).tolist()]

    def take_first(self) -> Batch:
        """The first batch, which is not trained on if another one is left."""
        first = self.texts[: self.batch_size]
        if len(self.texts) - len(first) >= self._step():
            self.texts = self.texts[self.batch_size :]
        return encode(first, self.tokenizer, self.max_length)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.texts), generator=self.dice).tolist()
        step = min(self._step(), len(order))
        for start in range(0, len(order) - step + 1, step):
            share = order[start + process_rank() : start + step : process_count()]
            yield encode([self.texts[i] for i in share], self.tokenizer, self.max_length)

    def _step(self) -> int:
        """Texts a step sees, over all processes."""
        return self.batch_size * process_count()
