"""The interface of tasks, the order of training examples, and evaluation."""

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
GROUP = 50  # number of batches whose examples are sorted by length together
Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]


@dataclass
class Prepared:
    """Model and data of a task. `train` and `evaluation`: model inputs, made from the raw `examples`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source
    examples: Mapping[str, Dataset]
    train: Dataset
    evaluation: Mapping[str, Dataset]
    collate: Collate
    max_length: int


class Task(ABC):
    """Base class of tasks. `task_type`: name of the task on the Hub. `main_metric`: decides which model is the best."""

    name: str
    task_type: str
    main_metric: str

    def __init__(self, options: Any):
        self.options = options

    @abstractmethod
    def prepare(self) -> Prepared:
        """Load model and data. Raises ValueError if options or data are invalid."""

    @abstractmethod
    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the predictions for a batch, one row per example. All batches must return rows of the same shape."""

    @abstractmethod
    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Compute the metrics of a split from all rows of `predict`, in the order of the data, on the main process."""


@dataclass(frozen=True)
class TrainingOrder:
    """An infinite sequence of training examples: the concatenated random permutations of all epochs.

    Step t uses examples t·B to (t+1)·B. All batches are therefore full, the order depends on the seed but not on the
    number of processes, and the position is given by the step number alone.

    >>> order = TrainingOrder(size=5, batch_size=2, seed=0)
    >>> sorted(i for _, batch in zip(range(5), order.batches(0)) for i in batch)
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """

    size: int
    batch_size: int
    seed: int
    lengths: Sequence[int] | None = None  # of the examples, if they are grouped by length

    def epoch(self, number: int) -> list[int]:
        """Return the order of all examples in an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.size, generator=generator).tolist()
        lengths = self.lengths
        if lengths is None:
            return order
        batches: list[list[int]] = []
        for start in range(0, self.size, GROUP * self.batch_size):
            group = sorted(order[start : start + GROUP * self.batch_size], key=lambda i: -lengths[i])
            batches += [group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]
        # an incomplete batch stays last, otherwise the following ones would be shifted
        tail = [batches.pop()] if len(batches[-1]) < self.batch_size else []
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [i for b in [*(batches[j] for j in shuffled), *tail] for i in b]

    def batches(self, start: int) -> Iterator[list[int]]:
        """Iterate over the batches from step `start`, infinitely."""
        number, position = divmod(start * self.batch_size, self.size)
        order = self.epoch(number)
        while True:
            while len(order) < position + self.batch_size:
                number += 1
                order, position = order[position:] + self.epoch(number), 0
            yield order[position : position + self.batch_size]
            position += self.batch_size

    def share(self, start: int, end: int, rank: int, processes: int, accumulate: int) -> list[list[int]]:
        """Return the micro-batches of one process from step `start` to `end`, `accumulate` per step."""
        steps = zip(range(start, end), self.batches(start), strict=False)
        own = range(rank * accumulate, (rank + 1) * accumulate)
        return [batch[i :: processes * accumulate] for _, batch in steps for i in own]


def check_share(batch_size: int, processes: int, accumulate: int) -> None:
    """Raise ValueError unless all micro-batches have the same size."""
    if batch_size % (processes * accumulate):
        raise ValueError(
            f"--batch-size {batch_size} must be a multiple of {processes * accumulate}: {processes} process(es) × "
            f"{accumulate} gradient accumulation step(s)."
        )


def model_inputs(rows: Dataset, collate: Collate, numbers: list[int]) -> dict[str, Any]:
    """Collate examples to a batch without labels."""
    batch = collate([rows[i] for i in numbers])
    return {name: value for name, value in batch.items() if name in MODEL_INPUTS}


def shared_batches(
    session: Session, rows: Dataset, collate: Collate, order: TrainingOrder | None = None
) -> Iterator[dict[str, Any]]:
    """Iterate infinitely over the batches of this process, without labels."""
    order = order or TrainingOrder(len(rows), session.options.batch_size, session.options.seed)
    rank, processes = session.accelerator.process_index, session.accelerator.num_processes
    for batch in order.batches(0):
        yield model_inputs(rows, collate, batch[rank::processes])


def evaluation_loaders(session: Session, prepared: Prepared, batch_size: int) -> dict[str, DataLoader]:
    """Create a data loader per split. Each process evaluates a part of it; with --sequence-parallel, all of it."""
    loaders = {  # their generators keep the global random state unchanged
        split: DataLoader(rows, batch_size, collate_fn=prepared.collate, generator=torch.Generator().manual_seed(0))
        for split, rows in prepared.evaluation.items()
    }
    if session.sequence_group is not None:
        return loaders
    return {split: session.accelerator.prepare_data_loader(loader) for split, loader in loaders.items()}


@torch.no_grad()
def evaluate(session: Session, task: Task, model: nn.Module, loaders: Mapping[str, DataLoader]) -> dict[str, Any]:
    """Return the metrics of all splits, on all processes, in the format of result files."""
    accelerator, training, group = session.accelerator, model.training, session.sequence_group
    model.eval()
    if group is not None:  # metrics need the outputs for all positions
        hf_rfattn.shard_sequence(accelerator.unwrap_model(model), group, gather=True)
    metrics: dict[str, Metric] = {}
    with session.bar("evaluating", sum(map(len, loaders.values()))) as bar:
        for split, loader in loaders.items():
            parts: list[dict[str, Tensor]] = []
            for batch in loader:
                batch = send_to_device(batch, accelerator.device)
                inputs = {name: value for name, value in batch.items() if name not in TARGETS}  # the loss is not needed
                with accelerator.autocast():  # before accelerator.prepare, the model does not use autocast itself
                    outputs = model(**inputs)
                predictions = task.predict(outputs, batch)
                if group is None:  # drops examples that were repeated to fill the last batch
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
    """Convert metrics to the format of result files."""
    return {name: asdict(metric) for name, metric in metrics.items()}
