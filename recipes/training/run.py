"""A training recipe from its command line to its result file: prepare, train, finish."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from transformers import PreTrainedModel

import hf_rfattn
from hf_rfattn.results import STAGES

from .loop import Loop, as_document, evaluation_loaders, make_optimizer
from .models import attention_of, mechanism_parameters, set_attention
from .options import RunOptions
from .session import Session, in_session, latest_state, run_recipe
from .task import Prepared, Task, TrainingOrder, check_share
from .teaching import Inputs, add_adapters, make_teacher, model_inputs, recorded_transfer, transfer, transfer_document

Options = TypeVar("Options", bound=RunOptions)
ERROR_EXAMPLES, ERROR_TOKENS = 8, 2048  # at most, of the batch on which the error against softmax is measured
BUDGET = ("batch_size", "learning_rate", "weight_decay", "warmup", "scheduler", "max_gradient_norm")
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)  # every process has the whole model


def main(task: type[Task[Options]], options: type[Options], description: str) -> None:
    """The `main` of a recipe."""
    run_recipe(options, lambda parsed: run(task(parsed)), description)


def run(task: Task) -> Path:
    """Check, train, keep the model, write the result file; returns its path."""

    def work(session: Session) -> None:
        loop = prepare(session, task)
        train(loop)
        finish(loop)

    return in_session(task.options, "task", work)


def prepare(session: Session, task: Task) -> Loop:
    """Load model and data. What the user got wrong is told here, before anything is written."""
    started, options, accelerator = time.perf_counter(), task.options, session.accelerator
    set_seed(options.seed)
    with accelerator.main_process_first():  # the others find what it has cached
        prepared = task.prepare()
    model = prepared.model
    set_attention(model, options)
    order, steps = plan(session, prepared, options)
    teacher = make_teacher(accelerator.device, model, options)
    found: dict[str, Any] = {"attention": attention_of(model), "attention_error": None}
    found["transfer"] = recorded_transfer(options.model)
    if found["attention"] != "softmax":
        if any(getattr(module, "optimal", False) for module in model.modules()):  # variance="optimal"
            hf_rfattn.calibrate(model, a_few(prepared, order))
        found["attention_error"] = {"before": short_error(model, a_few(prepared, order)), "after": None}
    if options.transfer_steps and not mechanism_parameters(model):
        raise ValueError("--transfer-steps: this attention has no parameters to teach (see trainable of favor+).")
    if options.lora_rank:
        add_adapters(model, options.lora_rank)
    optimizer = make_optimizer(model, options)
    help_sharding(accelerator, model, options)
    if session.sequence_group is not None:
        hf_rfattn.shard_sequence(model, session.sequence_group)
    return Loop(session, task, prepared, order, steps, model, optimizer, teacher, started, found)


def train(loop: Loop) -> None:
    """Attention transfer if asked for, then the loop, from the last state if there is one; keeps the model."""
    session, task, prepared = loop.session, loop.task, loop.prepared
    accelerator, options = session.accelerator, task.options
    session.open_output()
    state = latest_state(session.output) if options.resume else None
    loop.evaluation = evaluation_loaders(session, prepared, options.eval_batch_size)
    before_training(loop, fresh=state is None)
    if options.gradient_checkpointing:
        prepared.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loop.model, loop.optimizer = accelerator.prepare(prepared.model, loop.optimizer)
    set_seed(options.seed, device_specific=True)  # from here on each process draws its own random numbers
    accelerator.register_for_checkpointing(loop.progress)
    if state is not None:
        loop.load_state(state)
    session.say(
        f"{task.name}: {len(prepared.examples['train'])} examples, {loop.steps} steps of {options.batch_size} on "
        f"{accelerator.num_processes} process(es), {accelerator.device.type}"
        + (f", from step {loop.progress.step}" if state else "")
    )
    if options.report_to:
        accelerator.init_trackers("hf-rfattn", config={k: str(v) for k, v in vars(options).items()})
    loop.run()
    if options.keep == "last":
        loop.save_model()


def before_training(loop: Loop, fresh: bool) -> None:
    """Attention transfer; the history of a run that is not resumed begins with evaluations before and after it."""
    session, prepared, options = loop.session, loop.prepared, loop.options
    prepared.model.to(session.accelerator.device)

    def look(stage: str) -> None:
        if options.evaluate_first and fresh:
            metrics = as_document(loop.evaluate(prepared.model))
            loop.progress.history.append({"step": 0, "stage": stage, "metrics": metrics})

    look(STAGES[0])
    if options.transfer_steps:
        done = transfer(
            session,
            prepared.model,
            Inputs(prepared.train, prepared.collate, loop.order, session.accelerator),
            steps=options.transfer_steps,
            learning_rate=options.transfer_learning_rate,
            parts=options.transfer_parts,
            measure=a_few(prepared, loop.order),
        )
        loop.found["transfer"] = transfer_document(done, options.batch_size)
        look(STAGES[1])


def finish(loop: Loop) -> None:
    """The result file of the run, and the card of its model."""
    session, task, prepared, progress = loop.session, loop.task, loop.prepared, loop.progress
    options, source, accelerator = task.options, prepared.source, session.accelerator
    if not accelerator.is_main_process:
        return
    model = hf_rfattn.shard_sequence(accelerator.unwrap_model(loop.model), None)
    whole = accelerator.distributed_type in WHOLE
    if loop.found["attention_error"] and whole and loop.kept_step == progress.step:  # this is the model that was kept
        loop.found["attention_error"]["after"] = short_error(model, a_few(prepared, loop.order))
    measured = {
        "task": f"made-up {task.name}" if source.is_sample else task.name,  # no score of the real task
        "task_type": task.task_type,
        "dataset": source.document(", ".join(prepared.evaluation), prepared.examples),
        "metrics": loop.kept_metrics,
        "main_metric": task.main_metric,
        "budget": budget(options, prepared, loop.steps),
        "samples_per_second": progress.samples / progress.seconds if progress.samples else None,
        "tokens_per_second": progress.tokens / progress.seconds if progress.samples else None,
        "peak_memory_bytes": progress.peak_memory_bytes or None,
        "wall_time_seconds": round(progress.wall_seconds, 3),
        "train_seconds": round(progress.seconds, 3),
        "distributed": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "parameters": sum(p.numel() for p in prepared.model.parameters()),
        "steps_done": progress.step,
        "stopped_early": progress.stopped_early,
        "kept_step": loop.kept_step,
        "history": progress.history,
        "options": dataclasses.asdict(options),
        **loop.found,
    }
    session.finish(measured, task.name)


def plan(session: Session, prepared: Prepared, options: RunOptions) -> tuple[TrainingOrder, int]:
    """The order of the data, and how many steps to take."""
    size = len(prepared.train)
    lengths = prepared.train["length"][:] if options.group_by_length else None
    check_share(options.batch_size, session.share()[1], options.accumulate)
    steps = options.max_steps or math.ceil(options.epochs * size / options.batch_size)
    return TrainingOrder(size, options.batch_size, options.seed, lengths), steps


def budget(options: RunOptions, prepared: Prepared, steps: int) -> dict[str, Any]:
    """What runs must share to be compared; nothing in it depends on the attention."""
    return {
        "steps": steps,
        "epochs": round(steps * options.batch_size / len(prepared.train), 4),
        "train_samples": len(prepared.examples["train"]),
        **{name: getattr(options, name) for name in BUDGET},
        "max_length": prepared.max_length,
    }


def help_sharding(accelerator: Accelerator, model: PreTrainedModel, options: RunOptions) -> None:
    """What FSDP2 and DeepSpeed cannot find out by themselves."""
    if options.lora_rank and accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError("--lora-rank does not work with FSDP or DeepSpeed: adapters are merged into whole matrices.")
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap is None:
        # accelerate shards the embedding by itself: a layer that holds it, as BertEmbeddings does, must not be named
        embedding = model.get_input_embeddings()
        layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
        names = {type(m).__name__ for m in layers if all(child is not embedding for child in m.modules())}
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(names)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = options.batch_size // accelerator.num_processes // options.accumulate
        config["gradient_accumulation_steps"] = options.accumulate
        config["gradient_clipping"] = options.max_gradient_norm


def a_few(prepared: Prepared, order: TrainingOrder) -> dict[str, Any]:
    """The first examples of the training, as a batch without labels."""
    count = max(1, min(ERROR_EXAMPLES, ERROR_TOKENS // prepared.max_length))
    return model_inputs(prepared.train, prepared.collate, order.epoch(0)[:count])


def short_error(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Against softmax, by layer, without the heads."""
    document = hf_rfattn.attention_error(model, batch).to_dict()
    return {name: document[name] for name in ("layers", "overall", "average")}
