"""What a recipe defines about its task, and the order in which training sees its examples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_rfattn.results import Metric

from .data import Source

GROUP = 50  # batches within which examples are sorted by length
Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]


@dataclass
class Prepared:
    """A task with its model and data, ready for the loop.

    `train` and `evaluation` hold model inputs; `examples` what they were made from, for the fingerprint.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source
    examples: Mapping[str, Dataset]
    train: Dataset
    evaluation: Mapping[str, Dataset]
    collate: Collate
    max_length: int


class Task(ABC):
    """One task. `task_type`: as the Hub calls it. `main_metric`: what the best model is the best of."""

    name: str
    task_type: str
    main_metric: str

    def __init__(self, options: Any):
        self.options = options

    @abstractmethod
    def prepare(self) -> Prepared:
        """Load and check everything. What the user got wrong is a ValueError."""

    @abstractmethod
    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What evaluation keeps of one batch, a row an example; rows of all batches must fit together."""

    @abstractmethod
    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Metrics of a split from the rows of `predict`, in the order of the data. Runs on the main process alone."""


@dataclass(frozen=True)
class TrainingOrder:
    """The endless order of training examples: each epoch is a new permutation, and the next begins where one ends.

    Step t takes examples t·B to (t+1)·B of it. So every batch is full, the order depends on the seed alone and not on
    the number of processes, and the step number is all there is to know about the position.

    >>> order = TrainingOrder(size=5, batch_size=2, seed=0)
    >>> sorted(i for _, batch in zip(range(5), order.batches(0)) for i in batch)
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    size: int
    batch_size: int
    seed: int
    lengths: Sequence[int] | None = None  # group by them, if given

    def epoch(self, number: int) -> list[int]:
        """All examples once, in the order of this epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.size, generator=generator).tolist()
        lengths = self.lengths
        if lengths is None:
            return order
        batches: list[list[int]] = []
        for start in range(0, self.size, GROUP * self.batch_size):
            group = sorted(order[start : start + GROUP * self.batch_size], key=lambda i: -lengths[i])
            batches += [group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]
        tail = [batches.pop()] if len(batches[-1]) < self.batch_size else []  # stays last, or batches would shift
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [i for b in [*(batches[j] for j in shuffled), *tail] for i in b]

    def batches(self, start: int) -> Iterator[list[int]]:
        """Batches from step `start` on, without end."""
        number, position = divmod(start * self.batch_size, self.size)
        order = self.epoch(number)
        while True:
            while len(order) < position + self.batch_size:
                number += 1
                order, position = order[position:] + self.epoch(number), 0
            yield order[position : position + self.batch_size]
            position += self.batch_size

    def share(self, start: int, end: int, rank: int, processes: int, passes: int) -> list[list[int]]:
        """What one process sees of the steps from `start` to `end`: its part of each batch, in `passes` pieces."""
        steps = zip(range(start, end), self.batches(start), strict=False)
        pieces = range(rank * passes, (rank + 1) * passes)
        return [batch[piece :: processes * passes] for _, batch in steps for piece in pieces]


def check_share(batch_size: int, processes: int, passes: int) -> None:
    """Every process gets as many rows of each batch, in every pass."""
    if batch_size % (processes * passes):
        raise ValueError(
            f"--batch-size {batch_size} cannot be shared by {processes} processes in {passes} passes (--accumulate): "
            f"it must be a multiple of {processes * passes}."
        )
