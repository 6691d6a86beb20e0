"""What a recipe defines about its task, the order in which training sees its examples, and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_rfattn
from hf_rfattn.results.schema import Metric

from .data import Source
from .session import Session

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
TARGETS = {"labels", "start_positions", "end_positions"}
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


def model_inputs(rows: Dataset, collate: Collate, numbers: list[int]) -> dict[str, Any]:
    """Examples as a batch without labels."""
    batch = collate([rows[i] for i in numbers])
    return {name: value for name, value in batch.items() if name in MODEL_INPUTS}


def shared_batches(
    session: Session, rows: Dataset, collate: Collate, order: TrainingOrder | None = None
) -> Iterator[dict[str, Any]]:
    """The share of this process of all examples, batch after batch without end and without labels."""
    order = order or TrainingOrder(len(rows), session.options.batch_size, session.options.seed)
    rank, processes = session.accelerator.process_index, session.accelerator.num_processes
    for batch in order.batches(0):
        yield model_inputs(rows, collate, batch[rank::processes])


def evaluation_loaders(session: Session, prepared: Prepared, batch_size: int) -> dict[str, DataLoader]:
    """One loader per split, shared among the processes, unless they share sequences: then each has all of it.

    Its own generator leaves the random state of training alone.
    """
    loaders = {
        split: DataLoader(rows, batch_size, collate_fn=prepared.collate, generator=torch.Generator().manual_seed(0))
        for split, rows in prepared.evaluation.items()
    }
    if session.sequence_group is not None:
        return loaders
    return {split: session.accelerator.prepare_data_loader(loader) for split, loader in loaders.items()}


@torch.no_grad()
def evaluate(session: Session, task: Task, model: nn.Module, loaders: Mapping[str, DataLoader]) -> dict[str, Any]:
    """Every metric of every split as a document, the same on all processes; the main one scores the predictions."""
    accelerator, training, group = session.accelerator, model.training, session.sequence_group
    model.eval()
    if group is not None:  # scores need the predictions of all positions
        hf_rfattn.shard_sequence(accelerator.unwrap_model(model), group, gather=True)
    metrics: dict[str, Metric] = {}
    with session.bar("evaluating", sum(map(len, loaders.values()))) as bar:
        for split, loader in loaders.items():
            parts: list[dict[str, Tensor]] = []
            for batch in loader:
                batch = send_to_device(batch, accelerator.device)
                inputs = {name: value for name, value in batch.items() if name not in TARGETS}  # no loss is needed
                with accelerator.autocast():  # a model that is not prepared yet has no autocast of its own
                    outputs = model(**inputs)
                predictions = task.predict(outputs, batch)
                if group is None:  # drops the examples that were repeated to give every process a full last batch
                    predictions = accelerator.gather_for_metrics(predictions)
                parts.append({k: v.cpu() for k, v in predictions.items()})
                bar.update()
            if accelerator.is_main_process:
                metrics |= task.score(split, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    shared = [as_document(metrics)]
    broadcast_object_list(shared)
    model.train(training)
    if group is not None:
        hf_rfattn.shard_sequence(accelerator.unwrap_model(model), group)
    return shared[0]


def as_document(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """For result files."""
    return {name: asdict(metric) for name, metric in metrics.items()}
