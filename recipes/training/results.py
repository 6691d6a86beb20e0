"""The result file of a run, kind "task": what `hf-rfattn card` and comparisons are made from."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_rfattn.results import checkpoint_fingerprint, name_of, new_result, parse_result

from .data import fingerprint
from .loop import Loop
from .options import RunOptions
from .output import MODEL, as_document
from .state import RunProgress
from .task import Prepared

PACKAGES = ("accelerate", "datasets", "evaluate", "tokenizers")
BUDGET = ("batch_size", "learning_rate", "weight_decay", "warmup", "scheduler", "max_gradient_norm")


def begin_result(accelerator: Accelerator, options: RunOptions) -> dict[str, Any]:
    """What is known when a run starts."""
    return new_result("task", seed=options.seed, device=accelerator.device.type, packages=PACKAGES)


def finish_result(
    started: Mapping[str, Any],
    loop: Loop,
    attention: Any,
    error: Mapping[str, Any] | None,
    transfer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The whole document, checked."""
    task, prepared, accelerator, progress = loop.task, loop.prepared, loop.accelerator, loop.progress
    options, source = task.options, prepared.source
    document = {
        **started,
        "model": base_name(options),
        "base_license": options.model_license,
        "task": f"made-up {task.name}" if source.is_sample else task.name,  # no score of the real task
        "task_type": task.task_type,
        "dataset": {
            "name": source.name,
            "config": source.config,
            "split": ", ".join(prepared.evaluation),
            "fingerprint": fingerprint(prepared.examples),
        },
        "attention": attention,
        "metrics": loop.kept_metrics,
        "main_metric": task.main_metric,
        "budget": budget(options, prepared, loop.steps),
        "samples_per_second": rate(progress.samples, progress),
        "tokens_per_second": rate(progress.tokens, progress),
        "padded_tokens_per_second": rate(progress.padded_tokens, progress),
        "peak_memory_bytes": progress.peak_memory_bytes or None,
        "wall_time_seconds": round(progress.wall_seconds, 3),
        "train_seconds": round(progress.seconds, 3),
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "parameters": sum(p.numel() for p in prepared.model.parameters()),
        "steps_done": progress.step,
        "stopped_early": progress.stopped_early,
        "kept_step": loop.kept_step,
        "history": progress.history,
        "attention_error": error,
        "transfer": transfer,
        "checkpoint": checkpoint_fingerprint(loop.output / MODEL),
        "command": command(accelerator),
        "options": as_document(options),
        **prepared.facts,
    }
    parse_result(document)
    return document


def base_name(options: RunOptions) -> str:
    """What the base model is called: a folder by its own name, never by its path."""
    given = options.model or "from scratch"
    return options.model_name or name_of(given)


def budget(options: RunOptions, prepared: Prepared, steps: int) -> dict[str, Any]:
    """What runs must share to be compared; nothing in it depends on the attention."""
    return {
        "steps": steps,
        "epochs": round(steps * options.batch_size / len(prepared.train), 4),
        "train_samples": len(prepared.examples["train"]),
        **{name: getattr(options, name) for name in BUDGET},
        "max_length": prepared.max_length,
    }


def rate(count: int, progress: RunProgress) -> float | None:
    return count / progress.seconds if count and progress.seconds > 0 else None


def command(accelerator: Accelerator) -> list[str]:
    """The words that start such a run again; python and the script by their names."""
    processes = str(accelerator.num_processes)
    if accelerator.num_processes == 1:
        launcher = ["python"]
    elif accelerator.device.type == "cpu":
        launcher = ["torchrun", "--nproc_per_node", processes]
    else:
        launcher = ["accelerate", "launch", "--num_processes", processes]
    return [*launcher, Path(sys.argv[0]).name, *sys.argv[1:]]
