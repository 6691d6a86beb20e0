"""What surrounds the work of every recipe: messages, accelerate, the output folder, and the result file with its card.

A recipe that does not train calls `in_session` itself, as `convert.py` does; those that do come from `run.py`.
"""

import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import GradientAccumulationPlugin
from filelock import FileLock
from huggingface_hub import get_token
from huggingface_hub.utils import validate_repo_id
from tqdm.auto import tqdm

import hf_rfattn
from hf_rfattn.results import (
    RESULTS,
    checkpoint_fingerprint,
    name_of,
    new_result,
    parse_result,
    without_folders,
    write_result,
)

from .messages import errors_as_messages
from .output import (
    MODEL,
    RESULT,
    STATES,
    TOKENIZER,
    TRANSFER,
    check_output,
    check_shared,
    how_to_continue,
    open_output,
    output_lock,
)

PACKAGES = ("accelerate", "datasets", "scikit-learn", "tokenizers")
SECONDS_BETWEEN_LINES = 20.0  # of progress, where it is no terminal that shows it


@dataclass
class Session:
    """One run of a recipe, on every process. `document`: its result so far."""

    options: Any
    accelerator: Accelerator
    lock: FileLock
    document: dict[str, Any]
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.output = Path(self.options.output)

    def say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    def bar(self, what: str, total: int, done: int = 0) -> tqdm:
        """Of progress: a bar on a terminal, else a line now and then."""
        seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        return tqdm(
            desc=what, total=total, initial=done, disable=not self.accelerator.is_main_process, mininterval=seconds,
            leave=what == "training", miniters=1, dynamic_ncols=True,
        )  # fmt: skip

    def open_output(self) -> None:
        """From here on the folder is this run's. Everything that can be checked before has been."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            open_output(self.options, self.lock)
        self.accelerator.wait_for_everyone()
        check_shared(self.output)

    def finish(self, found: Mapping[str, Any], name: str) -> None:
        """Write the result, give the saved model its card, publish it if asked for. For the main process."""
        options, model = self.options, self.output / MODEL
        document = {**self.document, **found, "checkpoint": checkpoint_fingerprint(model)}
        parse_result(document)
        write_result(without_folders(document), model / RESULTS / f"{name}.json")
        if document["attention"] != "softmax":
            hf_rfattn.write_card(model, repo_id=options.push_to_hub)
        write_result(document, self.output / RESULT)
        for temporary in (STATES, TRANSFER, TOKENIZER):
            shutil.rmtree(self.output / temporary, ignore_errors=True)
        self.say(f"Written: {model} and {self.output / RESULT}")
        if options.push_to_hub:
            self.say(f"Published: {hf_rfattn.publish(model, options.push_to_hub, tell=self.say)}")


def in_session(options: Any, kind: str, work: Callable[[Session], Any]) -> Path:
    """Do the work of a recipe, unless its folder holds the result already; returns the path of that.

    `kind`: of the result document. The work calls `Session.open_output`, then on the main process `Session.finish`.
    """
    output = Path(options.output)
    lock = output_lock(options)
    try:
        with errors_as_messages(output):
            check_services(options)
            accelerator = make_accelerator(options)
            document = new_result(kind, seed=options.seed, device=accelerator.device.type, packages=PACKAGES)
            document |= {"model": base_name(options), "base_license": options.model_license}
            document |= {"processes": accelerator.num_processes, "command": command(accelerator)}
            session = Session(options, accelerator, lock, document)
            if check_output(options):
                session.say(f"{output / RESULT} is there: this run is finished.")
            else:
                quiet(accelerator)
                work(session)
                accelerator.wait_for_everyone()
                accelerator.end_training()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_continue(output)) from None
    finally:
        lock.release()
    return output / RESULT


def check_services(options: Any) -> None:
    """A tracker that is not installed or a Hub that would refuse is told before training, not after."""
    tracker, name = getattr(options, "report_to", None), options.push_to_hub
    if tracker and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--report-to {tracker}: it is not installed; pip install {tracker}.")
    if name:
        validate_repo_id(name)
        if "/" not in name:
            raise ValueError(f"--push-to-hub {name!r} does not say whose it is; write me/name.")
        if not get_token():
            raise ValueError("--push-to-hub needs a token of the Hub: run `hf auth login`, or set HF_TOKEN.")


def make_accelerator(options: Any) -> Accelerator:
    """As the launcher says; without a GPU, on the CPU."""
    on_cpu = not torch.accelerator.is_available()
    precision = getattr(options, "mixed_precision", None)
    if on_cpu and precision == "fp16":
        raise ValueError("--mixed-precision fp16 needs a GPU; on a CPU use bf16 or no.")
    passes = getattr(options, "accumulate", 1)
    return Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(passes, sync_with_dataloader=False),
        # random features are drawn alike on all processes: nothing to broadcast
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        log_with=getattr(options, "report_to", None),
        project_dir=options.output,
    )


def quiet(accelerator: Accelerator) -> None:
    """Leave warnings to the main process, and leave out the chatter of loading."""
    warnings.filterwarnings("ignore", "Without training")  # of patch_model: recipes train, or show what it costs
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)  # has no other name yet
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not accelerator.is_main_process or not sys.stderr.isatty():
        datasets.disable_progress_bars()


def base_name(options: Any) -> str:
    """What the base model is called: a folder by its own name, never by its path."""
    return options.model_name or name_of(options.model or "from scratch")


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
