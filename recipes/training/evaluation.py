"""Evaluation on all processes, scores from the main one."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .progress import Progress
from .task import Metric, Prepared, Task

TARGETS = {"labels", "start_positions", "end_positions"}


def evaluation_loaders(accelerator: Accelerator, prepared: Prepared, batch_size: int) -> dict[str, DataLoader]:
    """One loader a split, shared among the processes. A generator of its own keeps it from the training's dice."""
    return {
        split: accelerator.prepare_data_loader(
            DataLoader(
                rows,
                batch_size=batch_size,
                collate_fn=prepared.collate,
                generator=torch.Generator().manual_seed(0),
            )
        )
        for split, rows in prepared.evaluation.items()
    }


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    task: Task,
    prepared: Prepared,
    model: nn.Module,
    loaders: Mapping[str, DataLoader],
    progress: Progress,
) -> dict[str, Metric]:
    """Every metric of every split, the same on all processes."""
    training = model.training
    model.eval()
    metrics: dict[str, Metric] = {}
    with progress.phase("evaluating", sum(map(len, loaders.values()))) as advance:
        for split, loader in loaders.items():
            parts: list[dict[str, Tensor]] = []
            for batch in loader:
                inputs = {name: value for name, value in batch.items() if name not in TARGETS}  # no loss is needed
                predictions = task.predict(model(**inputs), batch)
                # drops the examples that were repeated to give every process a full last batch
                parts.append({k: v.cpu() for k, v in accelerator.gather_for_metrics(predictions).items()})
                advance()
            if accelerator.is_main_process:
                rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                found = len(next(iter(rows.values())))
                if found != len(prepared.evaluation[split]):
                    raise RuntimeError(
                        f"{found} predictions for {len(prepared.evaluation[split])} examples of {split}."
                    )
                metrics |= task.score(split, rows)
    shared = [metrics]
    broadcast_object_list(shared)
    model.train(training)
    return shared[0]
