"""A recipe from its command line to its result file."""

import importlib.util
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import datasets
import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import GradientAccumulationPlugin, set_seed
from filelock import FileLock
from huggingface_hub import get_token
from huggingface_hub.utils import validate_repo_id
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import hf_rfattn
from hf_rfattn.commands import disk_is_full
from hf_rfattn.hub.cards import write_card
from hf_rfattn.hub.folder import needs_calibration
from hf_rfattn.results import RESULTS, STAGES, without_folders, write_result

from .batches import TrainingOrder, check_share
from .distill import make_teacher
from .evaluation import evaluate, evaluation_loaders
from .loop import Loop
from .lora import add_adapters
from .models import attention_of, mechanism_parameters, set_attention
from .optimizer import make_optimizer
from .options import RunOptions, parse_options
from .output import (
    MODEL,
    RESULT,
    TOKENIZER,
    check_output,
    check_shared,
    check_space,
    how_to_continue,
    open_output,
    output_lock,
)
from .progress import Progress
from .results import begin_result, finish_result
from .state import PARTIAL, STATES, RunProgress, latest_state, load_state
from .task import Prepared, Task
from .transfer import TRANSFER, model_inputs, recorded_transfer, transfer, transfer_document

Options = TypeVar("Options", bound=RunOptions)
ERROR_EXAMPLES = 8  # of a batch on which the error against softmax is measured


def main(task: type[Task[Options]], options: type[Options], description: str) -> None:
    """The `main` of a recipe."""
    with told_at_once():
        parsed = parse_options(options, description=description)
    run(task(parsed))


@contextmanager
def told_at_once() -> Iterator[None]:
    """What the user got wrong becomes one message (a machine), and exit code 2."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError, ImportError, FloatingPointError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def run(task: Task) -> Path:
    """Check, train, keep the model, write the result file; returns its path."""
    lock = output_lock(task.options)
    try:
        with told_if_disk_is_full(Path(task.options.output)):
            return _run(task, lock)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_continue(Path(task.options.output))) from None
    finally:
        lock.release()


def _run(task: Task, lock: FileLock) -> Path:
    started = time.perf_counter()
    options, output = task.options, Path(task.options.output)
    with told_at_once():
        check_services(options)
        accelerator = make_accelerator(options)
        finished = check_output(options)
    tell = Progress(accelerator.is_main_process)
    if finished:
        tell.say(f"{output / RESULT} is there: this run is finished.")
        return output / RESULT
    quiet(accelerator)
    result = begin_result(accelerator, options)
    with told_at_once():
        set_seed(options.seed)
        with accelerator.main_process_first():  # the others find what it has cached
            prepared = task.prepare()
        set_attention(prepared.model, options)
        order, steps = plan(accelerator, prepared, options)
        check_space(output, sum(p.numel() for p in prepared.model.parameters()), options)
        teacher = make_teacher(accelerator, prepared.model, options)
        error_before = first_look(prepared, order)
        if options.transfer_steps and not mechanism_parameters(prepared.model):
            raise ValueError("--transfer-steps: this attention has no parameters to teach (see trainable of favor+).")
        if options.lora_rank:
            add_adapters(prepared.model, options.lora_rank)
        optimizer = make_optimizer(prepared.model, options)
    attention = attention_of(prepared.model)
    accelerator.wait_for_everyone()
    with told_at_once():
        if accelerator.is_main_process:
            open_output(options, lock)
        accelerator.wait_for_everyone()
        check_shared(output)

    state = latest_state(output) if options.resume else None
    evaluation = evaluation_loaders(accelerator, prepared, options.eval_batch_size)
    with told_at_once():
        transferred, stages = before_training(accelerator, task, prepared, order, evaluation, tell, state is None)

    if options.gradient_checkpointing:
        prepared.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with told_at_once():
        help_sharding(accelerator, prepared.model, options)
    model, optimizer = accelerator.prepare(prepared.model, optimizer)
    set_seed(options.seed, device_specific=True)  # from here on each process throws dice of its own
    with told_at_once():
        progress = RunProgress(history=stages) if state is None else load_state(accelerator, model, optimizer, state)
    tell.say(
        f"{task.name}: {len(prepared.examples['train'])} examples, {steps} steps of {options.batch_size} on "
        f"{accelerator.num_processes} process(es), {accelerator.device.type}"
        + (f", from step {progress.step}" if state else "")
    )
    if options.report_to:
        accelerator.init_trackers("hf-rfattn", config={k: str(v) for k, v in vars(options).items()})

    loop = Loop(
        accelerator=accelerator, task=task, prepared=prepared, model=model, optimizer=optimizer, order=order,
        steps=steps, evaluation=evaluation, output=output, tell=tell, progress=progress, started=started,
        teacher=teacher,
    )  # fmt: skip
    loop.run()
    loop.keep_model()
    error_after = last_look(loop, order)
    if accelerator.is_main_process:
        errors = None if error_before is None else {"before": error_before, "after": error_after}
        taught = (
            recorded_transfer(options.init)
            if transferred is None
            else transfer_document(transferred, options.batch_size)
        )
        document = finish_result(result, loop, attention, errors, taught)
        write_result(without_folders(document), output / MODEL / RESULTS / f"{task.name}.json")
        if attention != "softmax":
            write_card(output / MODEL, repo_id=options.push_to_hub)
        write_result(document, output / RESULT)
        for name in (STATES, TRANSFER, TOKENIZER):
            shutil.rmtree(output / name, ignore_errors=True)
        tell.say(f"Written: {output / MODEL} and {output / RESULT}")
        if options.push_to_hub:
            with told_at_once():
                address = hf_rfattn.publish(output / MODEL, options.push_to_hub, tell=tell.say)
            tell.say(f"Published: {address}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / RESULT


def before_training(
    accelerator: Accelerator,
    task: Task,
    prepared: Prepared,
    order: TrainingOrder,
    evaluation: Mapping[str, DataLoader],
    tell: Progress,
    fresh: bool,
) -> tuple[hf_rfattn.Conversion | None, list[dict[str, Any]]]:
    """Attention transfer, if asked for; and, of a run that is not resumed, the evaluations before and after it."""
    options, stages = task.options, []
    prepared.model.to(accelerator.device)

    def look(stage: str) -> None:
        if options.evaluate_first and fresh:
            metrics = evaluate(accelerator, task, prepared, prepared.model, evaluation, tell)
            stages.append({"step": 0, "stage": stage, "metrics": {k: m.to_dict() for k, m in metrics.items()}})
            tell.say(f"{stage}: " + "  ".join(f"{name} {metric.value:.4f}" for name, metric in metrics.items()))

    look(STAGES[0])
    if not options.transfer_steps:
        return None, stages
    transferred = transfer(accelerator, prepared, order, options, a_few(prepared, order))
    tell.say(str(transferred))
    look(STAGES[1])
    return transferred, stages


def make_accelerator(options: RunOptions) -> Accelerator:
    """As the launcher says; without a GPU, on the CPU."""
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and options.mixed_precision == "fp16":
        raise ValueError("--mixed-precision fp16 needs a GPU; on a CPU use bf16 or no.")
    return Accelerator(
        cpu=on_cpu,
        mixed_precision=options.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(options.accumulate, sync_with_dataloader=False),
        # random features are drawn alike on all processes: nothing to broadcast
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        log_with=options.report_to,
        project_dir=options.output,
    )


def check_services(options: RunOptions) -> None:
    """A tracker that is not installed or a Hub that would refuse is told before training, not after."""
    if options.report_to and importlib.util.find_spec(options.report_to) is None:
        raise ValueError(f"--report-to {options.report_to}: it is not installed; pip install {options.report_to}.")
    check_hub(options.push_to_hub)


def check_hub(name: str | None) -> None:
    """Whether a model could be published under this name, as far as can be known before."""
    if name:
        validate_repo_id(name)
        if "/" not in name:
            raise ValueError(f"--push-to-hub {name!r} does not say whose it is; write me/name.")
        if not get_token():
            raise ValueError("--push-to-hub needs a token of the Hub: run `hf auth login`, or set HF_TOKEN.")


def help_sharding(accelerator: Accelerator, model: PreTrainedModel, options: RunOptions) -> None:
    """What FSDP2 and DeepSpeed cannot find out by themselves."""
    if options.lora_rank and accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError(
            "--lora-rank does not go with FSDP or DeepSpeed here: adapters are added in from whole matrices."
        )
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


def quiet(accelerator: Accelerator) -> None:
    """Leave warnings to the main process, and leave out the chatter of loading."""
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)  # has no other name yet
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not accelerator.is_main_process or not sys.stderr.isatty():
        datasets.disable_progress_bars()


def plan(accelerator: Accelerator, prepared: Prepared, options: RunOptions) -> tuple[TrainingOrder, int]:
    """The order of the data, and how many steps to take."""
    size = len(prepared.train)
    lengths = prepared.train["length"][:] if options.group_by_length else None
    order = TrainingOrder(size, options.batch_size, options.seed, lengths)
    steps = options.max_steps or math.ceil(options.epochs * size / options.batch_size)
    check_share(options.batch_size, accelerator.num_processes, options.accumulate)
    return order, steps


def a_few(prepared: Prepared, order: TrainingOrder) -> dict[str, Any]:
    """The first examples of the training, as a batch without labels."""
    return model_inputs(prepared.train, prepared.collate, order.epoch(0)[:ERROR_EXAMPLES])


def first_look(prepared: Prepared, order: TrainingOrder) -> dict[str, Any] | None:
    """Before training: calibrate the features that want it, and measure the error against softmax."""
    model = prepared.model
    if attention_of(model) == "softmax":
        return None
    batch = a_few(prepared, order)
    if needs_calibration(attention_of(model)):
        hf_rfattn.calibrate(model, batch)
    return short_error(model, batch)


def last_look(loop: Loop, order: TrainingOrder) -> dict[str, Any] | None:
    """The error after training, where the model is in one piece and the one that was kept."""
    model = loop.accelerator.unwrap_model(loop.model)
    whole = loop.accelerator.distributed_type in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    if attention_of(model) == "softmax" or not whole or loop.kept_step != loop.progress.step:
        return None
    return short_error(model, a_few(loop.prepared, order))


def short_error(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """By layer, without the heads."""
    document = hf_rfattn.attention_error(model, batch).to_dict()
    return {name: document[name] for name in ("layers", "overall", "average")}


@contextmanager
def told_if_disk_is_full(output: Path) -> Iterator[None]:
    """Nothing is lost then: the state before is still whole."""
    try:
        yield
    except Exception as error:
        if not disk_is_full(error, output):
            raise
        for partial in (output / STATES).glob(f"{PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)
        sys.exit(f"{Path(sys.argv[0]).name}: the disk of {output} is full. Make room, then run again with --resume.")
