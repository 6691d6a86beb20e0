"""Training: preparation, the training loop, checkpoints and the result file."""

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import send_to_device, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import hf_rfattn
from hf_rfattn.results.schema import STAGES

from .models import attention_of, disable_dropout, make_optimizer, mechanism_parameters, rate_factor, set_attention
from .options import RunOptions
from .session import MODEL, PARTIAL, STATES, Session, peak_memory, run_recipe, whole_folder
from .task import Task, TrainingOrder, check_share, evaluate, evaluation_loaders, model_inputs, shared_batches
from .teaching import add_adapters, make_teacher, recorded_transfer, transfer, without_adapters

BUDGET = ("batch_size", "learning_rate", "weight_decay", "warmup", "scheduler", "max_gradient_norm")
ERROR_EXAMPLES, ERROR_TOKENS = 8, 2048  # maximum size of the batch on which the error of attention is measured
UNTIMED_STEPS = 3  # warm-up steps that are not timed
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)  # each process has the whole model


def main(task: type[Task], options: type[RunOptions], description: str) -> None:
    """Run a training recipe from its command line."""
    run_recipe(options, "task", lambda session: train(session, task(session.options)), description)


def train(session: Session, task: Task) -> None:
    """Train a model, save it, and write the result file."""
    training = Training(session, task)
    training.start()
    training.loop()
    training.finish()


@dataclass
class Progress:
    """Progress of a run, saved in checkpoints.

    `history`: metrics by step, with the mean training loss since the previous evaluation. `seconds`, `timed_steps` and
    `tokens`: time, number and tokens of all timed training steps, over all processes. `wall_seconds`: total time.
    """

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None
    loss_sum: float = 0.0  # since the last evaluation
    loss_steps: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    timed_steps: int = 0
    tokens: int = 0
    peak_memory_bytes: int = 0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Training:
    """A training run. Every process calls `start`, `loop` and `finish`, in this order."""

    def __init__(self, session: Session, task: Task):
        """Load model and data. All checks of options and data are here, before anything is written."""
        self.started = time.perf_counter()
        self.session, self.task, self.options = session, task, task.options
        self.accelerator = accelerator = session.accelerator
        options = self.options
        set_seed(options.seed)
        with accelerator.main_process_first():  # the other processes then use its cache
            self.prepared = prepared = task.prepare()
        self.model: Any = prepared.model  # wrapped by accelerate in `start`
        self.use_cache = getattr(self.model.config, "use_cache", False)
        self.model.config.use_cache = False  # training does not use the cache
        set_attention(self.model, options)
        check_share(options.batch_size, session.share()[1], options.accumulate)
        lengths = prepared.train["length"][:] if options.group_by_length else None
        self.order = TrainingOrder(len(prepared.train), options.batch_size, options.seed, lengths)
        self.steps = options.max_steps or math.ceil(options.epochs * self.order.size / options.batch_size)
        self.teacher = make_teacher(accelerator.device, self.model, options)
        if options.no_dropout or self.teacher is not None:  # dropout would add noise to the distillation loss
            disable_dropout(self.model)
        self.transfer, self.error = recorded_transfer(options.model), None
        self.attention = attention_of(self.model)
        count = max(1, min(ERROR_EXAMPLES, ERROR_TOKENS // prepared.max_length))
        self.error_batch = model_inputs(prepared.train, prepared.collate, self.order.epoch(0)[:count])
        if self.attention != "softmax":
            if any(getattr(module, "optimal", False) for module in self.model.modules()):  # variance="optimal"
                hf_rfattn.calibrate(self.model, self.error_batch)
            self.error = {"before": error_document(self.model, self.error_batch), "after": None}
        if options.transfer_steps and not mechanism_parameters(self.model):
            raise ValueError(
                "--transfer-steps: this attention has no parameters to train; use hedgehog or trainable=true."
            )
        if options.lora_rank:
            add_adapters(self.model, options.lora_rank)
        self.optimizer: Any = make_optimizer(self.model, options)
        configure_sharding(accelerator, self.model, options)
        if session.sequence_group is not None:
            hf_rfattn.shard_sequence(self.model, session.sequence_group)
        self.loaders = evaluation_loaders(session, prepared, options.eval_batch_size)
        self.progress = Progress()
        self.clock: float | None = None  # start of the current timing, None if steps are not timed
        self.tokens = 0  # number of tokens of timed steps on this process, since the last `_stop_clock`
        self.loss = torch.zeros((), device=accelerator.device)  # sum of the losses since the last `_read_loss`
        self.unread = 0  # number of steps in this sum

    def start(self) -> None:
        """Run attention transfer if enabled, prepare model and optimizer, and load the last checkpoint, if any."""
        session, options, accelerator, progress = self.session, self.options, self.accelerator, self.progress
        session.open_output()
        state = max((session.output / STATES).glob("step-*"), default=None) if options.resume else None
        self.model.to(accelerator.device)
        self._evaluate_stage(0, fresh=state is None)
        if options.transfer_steps:
            batches = shared_batches(session, self.prepared.train, self.prepared.collate, self.order)
            self.transfer = transfer(session, self.model, batches, self.error_batch)
            self.attention = attention_of(self.model)  # --exact-heads may have changed it
            self._evaluate_stage(1, fresh=state is None)
        if options.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        set_seed(options.seed, device_specific=True)  # a different random seed in each process, for dropout
        accelerator.register_for_checkpointing(progress)
        if state is not None:
            accelerator.load_state(str(state))
        session.say(
            f"{self.task.name}: {len(self.prepared.examples['train'])} examples, {self.steps} steps of "
            f"{options.batch_size} on {accelerator.num_processes} process(es), {accelerator.device.type}"
            + (f", from step {progress.step}" if state else "")
        )
        if options.report_to:
            accelerator.init_trackers("hf-rfattn", config={k: str(v) for k, v in vars(options).items()})

    def _evaluate_stage(self, stage: int, fresh: bool) -> None:
        """With --evaluate-first, evaluate before training. A resumed run has these evaluations in its checkpoint."""
        if self.options.evaluate_first and fresh:
            self.progress.history.append({"step": 0, "stage": STAGES[stage], "metrics": self._metrics()})

    def loop(self) -> None:
        """Train until the last step or early stopping, and save the model."""
        progress, first = self.progress, self.progress.step
        self.model.train()
        batches = self._batches()
        with self.session.bar("training", self.steps, first) as bar:
            while progress.step < self.steps and not self._stops_early():
                if progress.step - first == UNTIMED_STEPS:
                    self.clock = time.perf_counter()
                self._step(batches)
                progress.step += 1
                progress.timed_steps += self.clock is not None
                if progress.step % self.options.log_every == 0:
                    bar.set_postfix_str(self._read_loss(), refresh=False)
                bar.update()
                self._between_steps()
        self._stop_clock()
        if self.options.keep == "last":
            self._save_model()

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """Iterate over the micro-batches of this process from the current step, on its device."""
        rank, processes = self.session.share()
        loader = DataLoader(
            self.prepared.train,
            batch_sampler=self.order.share(self.progress.step, self.steps, rank, processes, self.options.accumulate),
            collate_fn=self.prepared.collate,
            pin_memory=self.accelerator.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # keeps the global random state unchanged
        )
        for batch in loader:
            if self.clock is not None:  # count tokens without padding
                self.tokens += int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum())
            yield send_to_device(batch, self.accelerator.device, non_blocking=True)

    def _step(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """Run one optimizer step, with gradient accumulation."""
        accelerator, options, step = self.accelerator, self.options, self.progress.step
        factor = rate_factor(step, self.steps, options.warmup, options.scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        if options.redraw_every and step and step % options.redraw_every == 0:
            hf_rfattn.redraw(self.model)  # deterministic, so all processes get the same features
        for _ in range(options.accumulate):
            batch = next(batches)
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss if self.teacher is None else self.teacher.loss(self.model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and options.max_gradient_norm:
                    accelerator.clip_grad_norm_(self.model.parameters(), options.max_gradient_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.loss += loss.detach() / options.accumulate
        self.unread += 1

    def _read_loss(self) -> str:
        """Return the mean loss since the last call, over all processes. It waits for the device, so call it rarely."""
        if not self.unread:
            return ""
        progress = self.progress
        loss = float(self.accelerator.reduce(self.loss, reduction="mean")) / self.unread
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The loss became {loss} before step {progress.step}. Try a lower --learning-rate, more --warmup, or "
                "--mixed-precision no."
            )
        progress.loss_sum += loss * self.unread
        progress.loss_steps += self.unread
        self.loss.zero_()
        self.unread = 0
        rate = self.optimizer.param_groups[0]["lr"]
        self.accelerator.log({"train/loss": loss, "train/learning_rate": rate}, step=progress.step)
        return f"loss {loss:.4f}"

    def _between_steps(self) -> None:
        """Evaluate, save the best model and save a checkpoint, if due. This time does not count as training time.

        A checkpoint follows each new best model, so that a resumed run knows which model was saved.
        """
        options, step, timed = self.options, self.progress.step, self.clock is not None
        every = options.evaluate_every or math.ceil(self.order.size / self.order.batch_size)
        evaluation_due = step == self.steps or step % every == 0
        save_due = options.save_every and (step == self.steps or step % options.save_every == 0)
        if not (evaluation_due or save_due):
            return
        self._read_loss()
        self._stop_clock()
        if evaluation_due and self._is_best() and options.keep == "best":
            self._save_model()
            save_due = options.save_every
        if save_due or (options.save_every and self._stops_early()):
            self._stop_clock()
            self._save_state()
        self.clock = time.perf_counter() if timed else None

    def _metrics(self) -> dict[str, Any]:
        """Evaluate the current model on all splits."""
        metrics = evaluate(self.session, self.task, self.model, self.loaders)
        found = "  ".join(f"{name} {metric['value']:.4f}" for name, metric in metrics.items())
        self.session.say(f"step {self.progress.step}: {found}")
        return metrics

    def _is_best(self) -> bool:
        """Evaluate, and return whether the model is the best so far."""
        progress, name, metrics = self.progress, self.task.main_metric, self._metrics()
        best = self._recorded(progress.best_step)
        loss = progress.loss_sum / max(1, progress.loss_steps)
        progress.loss_sum, progress.loss_steps = 0.0, 0
        progress.history.append({"step": progress.step, "train_loss": loss, "metrics": metrics})
        self.accelerator.log({f"eval/{k}": metric["value"] for k, metric in metrics.items()}, step=progress.step)
        sign = -1 if metrics[name]["lower_is_better"] else 1
        if best is not None and sign * metrics[name]["value"] <= sign * best[name]["value"]:
            return False
        progress.best_step = progress.step
        return True

    def _recorded(self, step: int | None) -> Any:
        """Return the metrics recorded at a step."""
        return next((entry["metrics"] for entry in self.progress.history if step and entry["step"] == step), None)

    def _stops_early(self) -> bool:
        """Whether --early-stop ends the training."""
        best, patience = self.progress.best_step, self.options.early_stop
        later = sum(entry["step"] > best for entry in self.progress.history) if best is not None else 0
        return patience is not None and later >= patience

    def _stop_clock(self) -> None:
        """Stop timing, and add times, tokens and peak memory of all processes to the progress."""
        accelerator, progress = self.accelerator, self.progress
        if self.clock is not None:
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize(accelerator.device)  # include kernels that are still running
            progress.seconds += time.perf_counter() - self.clock
            self.clock = None
        counts = torch.tensor([self.tokens, peak_memory(accelerator.device)], device=accelerator.device)
        tokens, peaks = accelerator.gather(counts).view(-1, 2).unbind(1)
        # processes that split a sequence all count its tokens
        progress.tokens += int(tokens.sum()) // self.session.sequence_parallel
        progress.peak_memory_bytes = max(progress.peak_memory_bytes, int(peaks.max()))
        self.tokens, now = 0, time.perf_counter()
        progress.wall_seconds += now - self.started
        self.started = now

    def _save_model(self) -> None:
        """Save model and tokenizer, atomically. Every process must call this, since shards are gathered."""
        weights = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(self.model)
            weights = without_adapters(model, weights)
            for name, source in self.prepared.model.all_tied_weights_keys.items():  # gathering copies tied weights
                if source in weights:
                    weights[name] = weights[source]
            with whole_folder(self.session.output / MODEL) as partial:
                model.config.use_cache = self.use_cache
                model.save_pretrained(partial, state_dict=weights)
                model.config.use_cache = False
                self.prepared.tokenizer.save_pretrained(partial)
        self.accelerator.wait_for_everyone()

    def _save_state(self) -> None:
        """Save a checkpoint atomically and delete the previous one. Every process must call this."""
        accelerator, states = self.accelerator, self.session.output / STATES
        target = states / f"step-{self.progress.step:08}"
        if target.exists():  # the run was resumed from it
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

    def finish(self) -> None:
        """Write the result file and the model card."""
        task, prepared, progress = self.task, self.prepared, self.progress
        options, accelerator = self.options, self.accelerator
        if not accelerator.is_main_process:
            return
        kept = progress.best_step if options.keep == "best" and progress.best_step is not None else progress.step
        if self.error and accelerator.distributed_type in WHOLE and kept == progress.step:  # this model was saved
            model = hf_rfattn.shard_sequence(accelerator.unwrap_model(self.model), None)
            self.error["after"] = error_document(model, self.error_batch)
        budget = {  # runs are comparable if these are equal; nothing here depends on the attention
            "steps": self.steps,
            "epochs": round(self.steps * options.batch_size / self.order.size, 4),
            "train_samples": len(prepared.examples["train"]),
            **{name: getattr(options, name) for name in BUDGET},
            "max_length": prepared.max_length,
        }
        samples, seconds = progress.timed_steps * options.batch_size, progress.seconds
        measured = {
            "task": task.name,
            "task_type": task.task_type,
            "dataset": prepared.source.document(", ".join(prepared.evaluation), prepared.examples),
            "metrics": self._recorded(kept),
            "main_metric": task.main_metric,
            "budget": budget,
            "samples_per_second": samples / seconds if samples else None,
            "tokens_per_second": progress.tokens / seconds if samples else None,
            "peak_memory_bytes": progress.peak_memory_bytes or None,
            "wall_time_seconds": round(progress.wall_seconds, 3),
            "train_seconds": round(seconds, 3),
            "distributed": accelerator.distributed_type.value,
            "mixed_precision": accelerator.mixed_precision,
            "parameters": sum(p.numel() for p in prepared.model.parameters()),
            "steps_done": progress.step,
            "stopped_early": progress.step < self.steps,
            "kept_step": kept,
            "history": progress.history,
            "options": dataclasses.asdict(options),
            "attention": self.attention,
            "attention_error": self.error,
            "transfer": self.transfer,
        }
        self.session.finish(measured, task.name)


def configure_sharding(accelerator: Accelerator, model: PreTrainedModel, options: RunOptions) -> None:
    """Set options of FSDP2 and DeepSpeed that depend on the model or on options of the recipe."""
    if options.lora_rank and accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError("--lora-rank does not work with FSDP or DeepSpeed, which shard the weights. Use DDP.")
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap is None:
        # accelerate wraps the embedding itself, so layers that contain it, such as BertEmbeddings, must be left out
        embedding = model.get_input_embeddings()
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        names = {type(m).__name__ for m in layers if all(child is not embedding for child in m.modules())}
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(names)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = options.batch_size // accelerator.num_processes // options.accumulate
        config["gradient_accumulation_steps"] = options.accumulate
        config["gradient_clipping"] = options.max_gradient_norm


def error_document(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the error of the attention outputs by layer, in the format of result files."""
    document = hf_rfattn.attention_error(model, batch).to_dict()
    return {name: document[name] for name in ("layers", "overall", "average")}
