"""The training loop that all recipes share."""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_rfattn
from hf_rfattn.results import Metric

from .evaluation import as_document, as_text, evaluate
from .optimizer import rate_factor, set_learning_rate
from .order import ShareOfBatches, TrainingOrder
from .output import MODEL
from .saving import RunProgress, forget_other_bests, keep_best, save_best, save_model, save_state
from .session import Session
from .task import Prepared, Task
from .teaching import Teacher

UNTIMED_STEPS = 3  # the first steps of a process allocate and warm up


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

    def keep_model(self) -> None:
        """Put the model that is kept where the user finds it."""
        if self.options.keep == "last":
            save_model(self.accelerator, self.model, self.prepared, self.output / MODEL)
        elif self.accelerator.is_main_process:
            keep_best(self.output, self.kept_step)
        self.accelerator.wait_for_everyone()

    def _step(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """One step of the optimizer, in as many passes as accumulation asks for."""
        accelerator, options, step = self.accelerator, self.options, self.progress.step
        set_learning_rate(self.optimizer, rate_factor(step, self.steps, options.warmup, options.scheduler))
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
        share = ShareOfBatches(
            self.order, self.progress.step, self.steps, accelerator.process_index, accelerator.num_processes,
            options.accumulate,
        )  # fmt: skip
        loader = DataLoader(
            self.prepared.train,
            batch_sampler=share,
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
        if not self.meter.samples:
            return f"loss {loss:.4f}"
        speed = self.meter.samples * self.accelerator.num_processes / self.meter.seconds
        return f"loss {loss:.4f}  {speed:.0f} samples/s"

    def _between_steps(self) -> None:
        """Evaluate, keep the best and save the state, where due. The time of it is not that of training.

        Evaluation comes first: a state that was saved knows of every evaluation up to its step.
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
        if timed:
            self.meter.stop()
        if evaluation_due:
            self._evaluate()
        if save_due or (options.save_every is not None and progress.stopped_early):
            self._settle()
            save_state(self.accelerator, self.model, self.optimizer, progress, self.output)
        if options.keep == "best" and (save_due or options.save_every is None) and self.accelerator.is_main_process:
            forget_other_bests(self.output, progress.best_step)
        if timed:
            self.meter.start()

    def _evaluate(self) -> None:
        progress, main = self.progress, self.task.main_metric
        metrics = evaluate(self.session, self.task, self.prepared, self.model, self.evaluation)
        loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.loss_sum, progress.loss_steps = 0.0, 0
        best = progress.best
        progress.history.append({"step": progress.step, "train_loss": loss, "metrics": as_document(metrics)})
        self.accelerator.log({f"eval/{k}": m.value for k, m in metrics.items()}, step=progress.step)
        self.session.say(f"step {progress.step}: {as_text(metrics)}  (training loss {loss:.4f})")
        if best is None or is_better(metrics[main], best["metrics"][main]["value"]):
            progress.best_step, progress.evaluations_since_best = progress.step, 0
            if self.options.keep == "best":
                save_best(self.accelerator, self.model, self.prepared, self.output, progress.step)
        else:
            progress.evaluations_since_best += 1
        if self.options.early_stop is not None and progress.evaluations_since_best >= self.options.early_stop:
            progress.stopped_early = True

    def _settle(self) -> None:
        """Add what this process has counted to the progress of the run, summed over all processes."""
        if self.meter.running:
            self.meter.stop()
        accelerator, meter, progress = self.accelerator, self.meter, self.progress
        counts = torch.tensor([meter.samples, meter.tokens, meter.padded_tokens], device=accelerator.device)
        samples, tokens, padded = accelerator.reduce(counts, reduction="sum").tolist()
        progress.samples += samples
        progress.tokens += tokens
        progress.padded_tokens += padded
        progress.seconds += meter.seconds
        meter.reset()
        peak = torch.tensor([peak_memory(accelerator.device)], device=accelerator.device)
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, int(accelerator.gather(peak).max()))
        now = time.perf_counter()
        progress.wall_seconds += now - self.started
        self.started = now


def is_better(metric: Metric, value: float) -> bool:
    return metric.value < value if metric.lower_is_better else metric.value > value


class Meter:
    """How fast a process trains: seconds, samples and tokens of its steps, without evaluation and saving."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin to count from nothing, when it is started."""
        self._seconds = 0.0
        self.samples = self.tokens = self.padded_tokens = 0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits for what the device still has to do, which belongs to the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds, self._since = self.seconds, None

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """One batch on the CPU. Tokens that only fill up rows are counted apart."""
        if self.running:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            self.samples += len(ids)
            self.padded_tokens += ids.numel()
            self.tokens += ids.numel() if mask is None else int(mask.sum())


def peak_memory(device: torch.device) -> int:
    """Highest memory of this process so far: on a GPU what tensors took there, else what the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts what the launching process held before
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
