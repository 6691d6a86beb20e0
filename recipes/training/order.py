"""Which examples each step sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

GROUP = 50  # batches within which examples are sorted by length


@dataclass(frozen=True)
class TrainingOrder:
    """The endless order of training examples: each epoch is a new permutation, and the next begins where one ends.

    Step t takes examples t·B to (t+1)·B of it. So every batch is full, the order depends on the seed alone and not on
    the number of processes, and the step number is all there is to know about the position.

    >>> order = TrainingOrder(size=5, batch_size=2, seed=0)
    >>> steps = order.batches(0)
    >>> sorted(i for _ in range(5) for i in next(steps))
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    >>> late = order.batches(3)
    >>> steps = order.batches(0)
    >>> [next(steps) for _ in range(4)][3] == next(late)
    True
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
            batch = order[position : position + self.batch_size]
            position += len(batch)
            while len(batch) < self.batch_size:
                number, order = number + 1, self.epoch(number + 1)
                position = min(self.batch_size - len(batch), self.size)
                batch += order[:position]
            yield batch

    def share(self, start: int, end: int, rank: int, processes: int, passes: int) -> list[list[int]]:
        """What one process sees of the steps from `start` to `end`: its part of each batch, in `passes` pieces."""
        check_share(self.batch_size, processes, passes)
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
