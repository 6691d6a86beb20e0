"""Evaluation of a model on several processes, and the memory that a process takes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_rfattn
from hf_rfattn.results import Metric

from .session import Session
from .task import Prepared, Task

TARGETS = {"labels", "start_positions", "end_positions"}


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


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak of this process: of tensors on a GPU, else its largest resident set (0 if not on Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
