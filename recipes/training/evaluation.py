"""Evaluation on all processes, scores from the main one."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_rfattn.results import Metric

from .session import Session
from .task import Prepared, Task

TARGETS = {"labels", "start_positions", "end_positions"}


def evaluation_loaders(accelerator: Accelerator, prepared: Prepared, batch_size: int) -> dict[str, DataLoader]:
    """One loader a split, shared among the processes. Its own generator leaves the random state of training alone."""
    return {
        split: accelerator.prepare_data_loader(
            DataLoader(rows, batch_size, collate_fn=prepared.collate, generator=torch.Generator().manual_seed(0))
        )
        for split, rows in prepared.evaluation.items()
    }


@torch.no_grad()
def evaluate(
    session: Session, task: Task, prepared: Prepared, model: nn.Module, loaders: Mapping[str, DataLoader]
) -> dict[str, Metric]:
    """Every metric of every split, the same on all processes."""
    accelerator, training = session.accelerator, model.training
    model.eval()
    metrics: dict[str, Metric] = {}
    with session.bar("evaluating", sum(map(len, loaders.values()))) as bar:
        for split, loader in loaders.items():
            parts: list[dict[str, Tensor]] = []
            for batch in loader:
                inputs = {name: value for name, value in batch.items() if name not in TARGETS}  # no loss is needed
                predictions = task.predict(model(**inputs), batch)
                # drops the examples that were repeated to give every process a full last batch
                parts.append({k: v.cpu() for k, v in accelerator.gather_for_metrics(predictions).items()})
                bar.update()
            if accelerator.is_main_process:
                rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                found, expected = len(next(iter(rows.values()))), len(prepared.evaluation[split])
                if found != expected:
                    raise RuntimeError(f"{found} predictions for {expected} examples of {split}.")
                metrics |= task.score(split, rows)
    shared = [metrics]
    broadcast_object_list(shared)
    model.train(training)
    return shared[0]


def as_document(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: asdict(metric) for name, metric in metrics.items()}


def as_text(metrics: Mapping[str, Metric]) -> str:
    return "  ".join(f"{name} {metric.value:.4f}" for name, metric in metrics.items())
