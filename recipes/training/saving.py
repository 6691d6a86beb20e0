"""What a run saves, whole or not at all: the model that is kept, and states, from which `--resume` continues exactly.

    OUTPUT/state/step-00000200/   tensors.pt       weights, buffers (among them draws of random features), optimizer
                                  random_0.pt, …   the random generators of each process
                                  progress.json    step, evaluations so far, best so far, times

A state is written under another name, flushed to the disk, and renamed; the one before is deleted after that. Tensors
are filed by the names of parameters, not by process: one process can resume a state of two. (DeepSpeed keeps files of
its own, and those need the same number of processes.)
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from .output import BEST, MODEL, PARTIAL, STATES
from .task import Prepared
from .teaching import without_adapters

TENSORS, PROGRESS = "tensors.pt", "progress.json"
DEEPSPEED = "deepspeed"
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class RunProgress:
    """Where a run is.

    `history`: metrics by step, with the mean loss since the evaluation before. `seconds`, `samples` and tokens are
    those of timed training steps, over all processes; `wall_seconds` is everything.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False
    loss_sum: float = 0.0  # since the last evaluation
    loss_steps: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    peak_memory_bytes: int = 0

    @property
    def best(self) -> dict[str, Any] | None:
        """The entry of the best evaluation so far."""
        return next((entry for entry in self.history if entry["step"] == self.best_step), None)


def save_state(accelerator: Accelerator, model: nn.Module, optimizer: Any, progress: RunProgress, output: Path) -> None:
    """Write a state, make it the latest, delete the others. Every process must call this."""
    states = output / STATES
    target = states / f"step-{progress.step:08}"
    if target.exists():  # the run has just resumed from it
        return
    partial = states / f"{PARTIAL}{target.name}"
    if accelerator.is_main_process:
        for leftover in states.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        _write_state(accelerator, model, optimizer, progress, partial)
    except Exception:  # a full disk needs the room
        shutil.rmtree(partial, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        publish_folder(partial, target)
        for other in states.glob("step-*"):
            if other != target:
                shutil.rmtree(other)
    accelerator.wait_for_everyone()


def _write_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, progress: RunProgress, folder: Path
) -> None:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.save_state(str(folder / DEEPSPEED))
    else:
        tensors = {
            "model": get_model_state_dict(model, options=FULL),
            "optimizer": get_optimizer_state_dict(model, _plain(optimizer), options=FULL),
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        }
        if accelerator.is_main_process:
            torch.save(tensors, folder / TENSORS)
    torch.save(_random_states(), folder / f"random_{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        (folder / PROGRESS).write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")


def load_state(accelerator: Accelerator, model: nn.Module, optimizer: Any, state: Path) -> RunProgress:
    """Put everything back as it was. Every process must call this."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.load_state(str(state / DEEPSPEED))
    else:
        if (state / DEEPSPEED).exists():
            raise ValueError(f"{state} was written under DeepSpeed; go on with it under DeepSpeed.")
        with _told_if_damaged(state):
            tensors = torch.load(state / TENSORS, map_location="cpu", weights_only=True)
        set_optimizer_state_dict(model, _plain(optimizer), tensors["optimizer"], options=FULL)
        set_model_state_dict(model, tensors["model"], options=FULL)
        if accelerator.scaler is not None and tensors["scaler"] is not None:
            accelerator.scaler.load_state_dict(tensors["scaler"])
    own = state / f"random_{accelerator.process_index}.pt"
    with _told_if_damaged(state):
        if own.exists():  # a process that was not there before keeps those of its seed
            _set_random_states(torch.load(own, weights_only=True))
        return RunProgress(**json.loads((state / PROGRESS).read_text(encoding="utf-8")))


@contextmanager
def _told_if_damaged(state: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # readers raise errors of many kinds; all mean the same to the user
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{state} is damaged and cannot be continued from ({type(error).__name__}: {reason}). Delete that folder, "
            "then --resume starts the run again."
        ) from error


def publish_folder(partial: Path, target: Path) -> None:
    """Give a finished folder its name, in a way that a crash leaves either nothing or all of it there."""
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    os.rename(partial, target)
    flush(target.parent)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of the target if nothing fails."""
    partial = target.with_name(PARTIAL + target.name)
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(target, ignore_errors=True)
    publish_folder(partial, target)


def flush(path: Path) -> None:
    """To the disk itself, not only to the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _random_states() -> dict[str, Any]:
    """Of Python, numpy and torch, on the CPU and on this process's GPU: numbers and tensors, no objects to unpickle."""
    kind, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(words.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    kind, words, *rest = states["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def save_model(accelerator: Accelerator, model: nn.Module, prepared: Prepared, target: Path) -> None:
    """Save model and tokenizer, whole or not at all. Every process must call this: shards are gathered."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = without_adapters(accelerator.unwrap_model(model), weights)
        for name, source in prepared.model.all_tied_weights_keys.items():  # gathered shards come as copies
            if source in weights:
                weights[name] = weights[source]
        with whole_folder(target) as partial:
            with prepared.config_as_it_was():
                accelerator.unwrap_model(model).save_pretrained(partial, state_dict=weights)
            prepared.tokenizer.save_pretrained(partial)
    accelerator.wait_for_everyone()


def save_best(accelerator: Accelerator, model: nn.Module, prepared: Prepared, output: Path, step: int) -> None:
    """Under the name of its step: the best before it stays until a state knows of this one."""
    (output / BEST).mkdir(exist_ok=True)
    save_model(accelerator, model, prepared, _best(output, step))


def forget_other_bests(output: Path, step: int | None) -> None:
    for folder in (output / BEST).glob("step-*"):
        if step is None or folder != _best(output, step):
            shutil.rmtree(folder)


def keep_best(output: Path, step: int) -> None:
    """Make the best model the one that is kept. If it is not there, a run that was killed had got this far."""
    if _best(output, step).exists():
        shutil.rmtree(output / MODEL, ignore_errors=True)
        os.rename(_best(output, step), output / MODEL)
        flush(output)
    shutil.rmtree(output / BEST, ignore_errors=True)


def _best(output: Path, step: int) -> Path:
    return output / BEST / f"step-{step:08}"
