"""Attention transfer on the inputs of a task, before it is trained on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset

import hf_rfattn
from hf_rfattn.results import RESULTS

from .batches import TrainingOrder
from .options import RunOptions
from .task import Collate, Prepared

MODEL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
TRANSFER = "transfer"  # in the output folder, while the run is not finished; the name of its result file too


def model_inputs(rows: Dataset, collate: Collate, numbers: list[int]) -> dict[str, Any]:
    """Examples as a batch without labels."""
    batch = collate([rows[i] for i in numbers])
    return {name: value for name, value in batch.items() if name in MODEL_INPUTS}


@dataclass(frozen=True)
class Inputs:
    """The share of one process of all examples, batch after batch without labels, in an order that depends on the seed
    alone.
    """

    rows: Dataset
    collate: Collate
    order: TrainingOrder
    accelerator: Accelerator

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        for batch in self.order.batches(0):
            yield model_inputs(self.rows, self.collate, batch[rank::processes])


def transfer(
    accelerator: Accelerator, prepared: Prepared, order: TrainingOrder, options: RunOptions, measure: dict[str, Any]
) -> hf_rfattn.Conversion:
    """Teach the mechanisms of the model; a run that was interrupted goes on, one that has passed it gets its result."""
    given = {"learning_rate": options.transfer_learning_rate, "parts": options.transfer_parts}
    return hf_rfattn.convert(
        prepared.model,
        None,
        Inputs(prepared.train, prepared.collate, order, accelerator),
        steps=options.transfer_steps,
        measure=measure,
        checkpoint=Path(options.output) / TRANSFER if options.save_every else None,
        save_every=options.save_every or options.transfer_steps,
        **{name: value for name, value in given.items() if value is not None},
    )


def transfer_document(done: hf_rfattn.Conversion, batch_size: int) -> dict[str, Any]:
    """For the result file: what was done, and errors by layer."""
    return {
        "steps": max(done.steps.values()),
        "batch_size": batch_size,
        "seconds": round(done.seconds, 3),
        "error": {"before": done.before.overall, "after": done.after.overall, "average": done.after.average},
    }


def recorded_transfer(folder: str | None) -> dict[str, Any] | None:
    """What the conversion that --init goes on from has written of itself."""
    path = Path(folder or "") / RESULTS / f"{TRANSFER}.json"
    if folder is None or not path.exists():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    return {**document["transfer"], "dataset": document["dataset"]}
