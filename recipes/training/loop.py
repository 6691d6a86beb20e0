"""The training loop that all recipes share: steps, evaluation, the model that is kept, and states to resume from."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

import hf_rfattn
from hf_rfattn.results import Metric

from .models import mechanism_parameters
from .options import RunOptions
from .session import MODEL, PARTIAL, STATES, Session, whole_folder
from .task import Prepared, Task, TrainingOrder
from .teaching import Teacher, without_adapters

UNTIMED_STEPS = 3  # the first steps of a process allocate and warm up
TARGETS = {"labels", "start_positions", "end_positions"}


@dataclass
class RunProgress:
    """Where a run is.

    `history`: metrics by step, with the mean loss since the evaluation before. `seconds`, `samples` and `tokens` are
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
    peak_memory_bytes: int = 0

    def state_dict(self) -> dict[str, Any]:
        """For accelerate, as `load_state_dict`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass
class Loop:
    """One run of training.

    `model` and `optimizer` become what accelerate prepares of them. `started`: `time.perf_counter()` when this process
    began. `found`: what the result file says of the run besides its progress.
    """

    session: Session
    task: Task
    prepared: Prepared
    order: TrainingOrder
    steps: int
    model: nn.Module
    optimizer: Any
    teacher: Teacher | None
    started: float
    found: dict[str, Any]
    evaluation: Mapping[str, DataLoader] = field(default_factory=dict)
    progress: RunProgress = field(default_factory=RunProgress)

    def __post_init__(self) -> None:
        self.options, self.output, self.accelerator = self.task.options, self.session.output, self.session.accelerator
        self.meter = Meter(self.accelerator.device)
        self._loss = torch.zeros((), device=self.accelerator.device)  # summed since it was last read
        self._unread = 0

    def run(self) -> None:
        """Train to the end, or until early stopping."""
        progress, first = self.progress, self.progress.step
        self.model.train()
        batches = self._batches()
        with self.session.bar("training", self.steps, first) as bar:
            while progress.step < self.steps and not progress.stopped_early:
                if progress.step - first == UNTIMED_STEPS:
                    self.meter.start()
                self._step(batches)
                progress.step += 1
                if progress.step % self.options.log_every == 0:
                    bar.set_postfix_str(self._read_loss(), refresh=False)
                bar.update()
                self._between_steps()
        self._settle()

    @property
    def kept_step(self) -> int:
        """The step whose model the run is for."""
        best = self.progress.best_step
        return best if self.options.keep == "best" and best is not None else self.progress.step

    @property
    def kept_metrics(self) -> dict[str, Any]:
        """The evaluation of that model."""
        return next(entry["metrics"] for entry in self.progress.history if entry["step"] == self.kept_step)

    def save_model(self) -> None:
        """Save model and tokenizer, whole or not at all. Every process must call this: shards are gathered."""
        accelerator, prepared = self.accelerator, self.prepared
        weights = accelerator.get_state_dict(self.model)
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(self.model)
            weights = without_adapters(model, weights)
            for name, source in prepared.model.all_tied_weights_keys.items():  # gathered shards come as copies
                if source in weights:
                    weights[name] = weights[source]
            with whole_folder(self.output / MODEL) as partial:
                model.config.use_cache = prepared.use_cache
                model.save_pretrained(partial, state_dict=weights)
                model.config.use_cache = False
                prepared.tokenizer.save_pretrained(partial)
        accelerator.wait_for_everyone()

    def save_state(self) -> None:
        """Write a state under another name, rename it, delete the one before. Every process must call this."""
        accelerator, states = self.accelerator, self.output / STATES
        target = states / f"step-{self.progress.step:08}"
        if target.exists():  # the run has just resumed from it
            return
        partial = states / f"{PARTIAL}{target.name}"
        if accelerator.is_main_process:
            for leftover in states.glob(f"{PARTIAL}*"):
                shutil.rmtree(leftover)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            partial.rename(target)
            for other in states.glob("step-*"):
                if other != target:
                    shutil.rmtree(other)
        accelerator.wait_for_everyone()

    def load_state(self, state: Path) -> None:
        """Put everything back as it was, the random generators included. Every process must call this."""
        try:
            self.accelerator.load_state(str(state))
        except Exception as error:  # readers raise errors of many kinds; all mean the same to the user
            raise ValueError(
                f"{state} cannot be continued from: it is damaged, or was written by another number of processes "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Delete that folder, then --resume "
                "starts the run again."
            ) from error

    def evaluate(self, model: nn.Module) -> dict[str, Metric]:
        """Every metric of every split, the same on all processes."""
        metrics = evaluate(self.session, self.task, self.prepared, model, self.evaluation)
        found = "  ".join(f"{name} {metric.value:.4f}" for name, metric in metrics.items())
        self.session.say(f"step {self.progress.step}: {found}")
        return metrics

    def _step(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """One step of the optimizer, in as many passes as accumulation asks for."""
        accelerator, options, step = self.accelerator, self.options, self.progress.step
        factor = rate_factor(step, self.steps, options.warmup, options.scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        if options.redraw_every and step and step % options.redraw_every == 0:
            hf_rfattn.redraw(self.model)  # depends on the seed and the number of the draw: the same on every process
        for _ in range(options.accumulate):
            batch = next(batches)
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss if self.teacher is None else self.teacher.loss(self.model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and options.max_gradient_norm:
                    accelerator.clip_grad_norm_(self.model.parameters(), options.max_gradient_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self._loss += loss.detach() / options.accumulate
        self._unread += 1

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """This process's share of the data from the current step on, on its device."""
        accelerator, options = self.accelerator, self.options
        rank, processes = self.session.share()
        loader = DataLoader(
            self.prepared.train,
            batch_sampler=self.order.share(self.progress.step, self.steps, rank, processes, options.accumulate),
            collate_fn=self.prepared.collate,
            num_workers=options.workers,
            pin_memory=accelerator.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # or the iterator would draw from the global one
        )
        for batch in loader:
            self.meter.count(batch)
            yield send_to_device(batch, accelerator.device, non_blocking=True)

    def _read_loss(self) -> str:
        """The mean loss since the last reading, over all processes. It waits for the device: not to be done often."""
        if not self._unread:
            return ""
        progress = self.progress
        loss = float(self.accelerator.reduce(self._loss, reduction="mean")) / self._unread
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss became {loss} before step {progress.step}. Try a lower --learning-rate, more --warmup, or "
                "--mixed-precision no."
            )
        progress.loss_sum += loss * self._unread
        progress.loss_steps += self._unread
        self._loss.zero_()
        self._unread = 0
        rate = self.optimizer.param_groups[0]["lr"]
        self.accelerator.log({"train/loss": loss, "train/learning_rate": rate}, step=progress.step)
        return f"loss {loss:.4f}"

    def _between_steps(self) -> None:
        """Evaluate, keep the best and save the state, where due. The time of it is not that of training.

        A new best model is followed by a state, so that a resumed run knows which model is there.
        """
        options, progress = self.options, self.progress
        epoch = math.ceil(self.order.size / self.order.batch_size)
        last = progress.step == self.steps
        evaluation_due = last or progress.step % (options.evaluate_every or epoch) == 0
        save_due = options.save_every is not None and (last or progress.step % options.save_every == 0)
        if not (evaluation_due or save_due):
            return
        self._read_loss()
        timed = self.meter.running
        self.meter.stop()
        if evaluation_due and self._evaluate() and options.keep == "best":
            self.save_model()
            save_due = options.save_every is not None
        if save_due or (options.save_every is not None and progress.stopped_early):
            self._settle()
            self.save_state()
        if timed:
            self.meter.start()

    def _evaluate(self) -> bool:
        """Whether the model is the best so far."""
        progress, main = self.progress, self.task.main_metric
        metrics = self.evaluate(self.model)
        loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.loss_sum, progress.loss_steps = 0.0, 0
        best = next((entry["metrics"][main] for entry in progress.history if entry["step"] == progress.best_step), None)
        progress.history.append({"step": progress.step, "train_loss": loss, "metrics": as_document(metrics)})
        self.accelerator.log({f"eval/{k}": m.value for k, m in metrics.items()}, step=progress.step)
        sign = -1 if metrics[main].lower_is_better else 1
        better = best is None or sign * metrics[main].value > sign * best["value"]
        if better:
            progress.best_step, progress.evaluations_since_best = progress.step, 0
        else:
            progress.evaluations_since_best += 1
        if self.options.early_stop is not None and progress.evaluations_since_best >= self.options.early_stop:
            progress.stopped_early = True
        return better

    def _settle(self) -> None:
        """Add what this process has counted to the progress of the run, summed over all processes."""
        accelerator, meter, progress = self.accelerator, self.meter, self.progress
        meter.stop()
        counts = torch.tensor([meter.samples, meter.tokens], device=accelerator.device)
        samples, tokens = accelerator.reduce(counts, reduction="sum").tolist()
        repeated = self.options.sequence_parallel  # processes that have counted the same sequences
        progress.samples += samples // repeated
        progress.tokens += tokens // repeated
        progress.seconds += meter.seconds
        self.meter = Meter(accelerator.device)
        peak = torch.tensor([peak_memory(accelerator.device)], device=accelerator.device)
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, int(accelerator.gather(peak).max()))
        now = time.perf_counter()
        progress.wall_seconds += now - self.started
        self.started = now


@dataclass
class Meter:
    """How fast a process trains: seconds, samples and tokens of its steps, without evaluation and saving."""

    device: torch.device
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    running: bool = False

    def start(self) -> None:
        self.running, self._since = True, time.perf_counter()

    def stop(self) -> None:
        """Waits for what the device still has to do, which belongs to the time."""
        if self.running:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.running, self.seconds = False, self.seconds + time.perf_counter() - self._since

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """One batch on the CPU; padding does not count."""
        if self.running:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            self.samples += len(ids)
            self.tokens += ids.numel() if mask is None else int(mask.sum())


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process: on a GPU that of tensors there, else the largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


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
def evaluate(
    session: Session, task: Task, prepared: Prepared, model: nn.Module, loaders: Mapping[str, DataLoader]
) -> dict[str, Metric]:
    """Every metric of every split, the same on all processes; predictions are scored on the main one."""
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
                predictions = task.predict(model(**inputs), batch)
                if group is None:  # drops the examples that were repeated to give every process a full last batch
                    predictions = accelerator.gather_for_metrics(predictions)
                parts.append({k: v.cpu() for k, v in predictions.items()})
                bar.update()
            if accelerator.is_main_process:
                metrics |= task.score(split, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    shared = [metrics]
    broadcast_object_list(shared)
    model.train(training)
    if group is not None:
        hf_rfattn.shard_sequence(accelerator.unwrap_model(model), group)
    return shared[0]


def as_document(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: asdict(metric) for name, metric in metrics.items()}


def make_optimizer(model: nn.Module, options: RunOptions) -> AdamW:
    """Matrices decay; biases, norms and mechanisms do not; mechanisms have a learning rate of their own."""
    mechanisms = mechanism_parameters(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = [p for name, p in named.items() if name in mechanisms]
    matrices = [p for name, p in named.items() if name not in mechanisms and p.ndim > 1]
    vectors = [p for name, p in named.items() if name not in mechanisms and p.ndim <= 1]
    rate = options.learning_rate
    if options.mechanism_learning_rate and not own:
        raise ValueError("--mechanism-learning-rate: this model's attention has no parameters of its own.")
    groups = [(matrices, rate, options.weight_decay), (vectors, rate, 0.0)]
    groups.append((own, options.mechanism_learning_rate or rate, 0.0))
    # fused: one pass over the weights per step instead of many, which matters on a CPU with a large vocabulary
    return AdamW([{"params": p, "lr": lr, "weight_decay": d, "peak": lr} for p, lr, d in groups if p], fused=True)


def rate_factor(step: int, steps: int, warmup: float, scheduler: str) -> float:
    """The share of the peak learning rate at a step (from 0): the schedule has no state but the step.

    >>> [round(rate_factor(step, 10, 2, "linear"), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    ramp = math.ceil(warmup * steps) if warmup < 1 else min(int(warmup), steps)
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[scheduler]
