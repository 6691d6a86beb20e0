"""A run of a recipe: accelerate, messages, the output folder, the result file and the model card.

Training recipes call `main` in `run.py`; other recipes call `run_recipe`, as `evaluate_lm.py` does.

OUTPUT/run.json       options of the run
OUTPUT/state/         checkpoint of training, deleted when the run is finished
OUTPUT/transfer/      checkpoint of attention transfer, deleted when the run is finished
OUTPUT/model/         model and tokenizer; patched models with card and results
OUTPUT/result.json    result; exists only if the run is finished
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.device_mesh import init_device_mesh
from tqdm.auto import tqdm

import hf_rfattn
from hf_rfattn.bench.measuring import resident_bytes
from hf_rfattn.results.documents import (
    RESULTS,
    check_writable,
    checkpoint_fingerprint,
    name_of,
    new_result,
    without_folders,
    write_result,
)
from hf_rfattn.results.schema import parse_result

from .messages import script
from .options import CommonOptions, flag, parse_options

RUN, MODEL, RESULT, STATES, TRANSFER = "run.json", "model", "result.json", "state", "transfer"
PARTIAL = "partial-"
FREE = {  # options that may change between a run and its continuation, since they do not change the result
    "resume", "overwrite", "accumulate", "eval_batch_size", "log_every", "save_every", "report_to", "output",
    "model_name", "model_license", "data_name", "gradient_checkpointing", "sequence_parallel",
}  # fmt: skip
PACKAGES = ("accelerate", "datasets", "scikit-learn", "tokenizers")
SECONDS_BETWEEN_LINES = 20.0  # of progress, if the output is not a terminal


@dataclass
class Session:
    """A run of a recipe; exists in every process. `document`: result document with the shared fields."""

    options: Any
    accelerator: Accelerator
    document: dict[str, Any]

    @property
    def output(self) -> Path:
        return Path(self.options.output)

    @property
    def sequence_parallel(self) -> int:
        """Number of processes that split each sequence."""
        return getattr(self.options, "sequence_parallel", 1)

    @cached_property
    def sequence_group(self) -> Any:
        """Device mesh of the processes that split sequences with this one; None without sequence parallelism."""
        size, processes = self.sequence_parallel, self.accelerator.num_processes
        if size == 1:
            return None
        if processes % size:
            raise ValueError(
                f"--sequence-parallel {size}: the number of processes must be a multiple of {size}, not {processes}."
            )
        shape = (processes // size, size)
        return init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=("data", "sequence"))["sequence"]

    def share(self) -> tuple[int, int]:
        """Data-parallel rank of this process, the same for all that split a sequence, and number of such ranks."""
        size = self.sequence_parallel
        return self.accelerator.process_index // size, max(1, self.accelerator.num_processes // size)

    def say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    def bar(self, what: str, total: int, done: int = 0) -> tqdm:
        """Create a progress bar; if the output is not a terminal, it prints a line every few seconds."""
        seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        return tqdm(
            desc=what, total=total, initial=done, disable=not self.accelerator.is_main_process, mininterval=seconds,
            leave=what == "training", miniters=1, dynamic_ncols=True,
        )  # fmt: skip

    def open_output(self) -> None:
        """Create the output folder. Call it after all checks, before anything is written."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            if self.options.overwrite:
                self._delete(STATES, MODEL, TRANSFER)
                (self.output / RESULT).unlink(missing_ok=True)
            write_result(dataclasses.asdict(self.options), self.output / RUN)
        self.accelerator.wait_for_everyone()

    def finish(self, found: Mapping[str, Any], name: str) -> None:
        """Write the result file, and the card of the saved model. Call it on the main process only."""
        model = self.output / MODEL
        document = {**self.document, **found, "checkpoint": checkpoint_fingerprint(model)}
        parse_result(document)
        write_result(without_folders(document), model / RESULTS / f"{name}.json")
        if document["attention"] != "softmax":
            hf_rfattn.write_card(model)
        write_result(document, self.output / RESULT)
        self._delete(STATES, TRANSFER)
        self.say(f"Written: {model} and {self.output / RESULT}")

    def _delete(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.output / name, ignore_errors=True)


def run_recipe(options: type[CommonOptions], kind: str, work: Callable[[Session], None], description: str) -> None:
    """Run a recipe from its command line."""
    with script():
        in_session(parse_options(options, description=description), kind, work)


def in_session(options: Any, kind: str, work: Callable[[Session], None]) -> Path:
    """Create a session, call `work` unless the result exists already, and return the path of the result.

    `kind`: kind of the result document. `work` must call `Session.open_output`, then `Session.finish` on the main
    process.
    """
    output, accelerator = Path(options.output), make_accelerator(options)
    document = new_result(kind, seed=options.seed, device=accelerator.device.type, packages=PACKAGES)
    document |= {"model": options.model_name or name_of(options.model or "none")}
    document |= {"base_license": options.model_license, "command": command(accelerator)}
    session = Session(options, accelerator, {**document, "processes": accelerator.num_processes})
    if check_output(options):
        session.say(f"{output / RESULT} exists: this run is finished.")
        return output / RESULT
    quiet(accelerator)
    try:
        work(session)
    except KeyboardInterrupt:
        if not (output / RUN).exists() or (output / RESULT).exists():
            raise
        saved = any((output / STATES).glob("step-*")) or any((output / TRANSFER).glob("*"))
        go_on = "Run the same command with --resume to continue from the last checkpoint."
        again = "No checkpoint was saved yet: the same command with --resume starts from the beginning."
        raise KeyboardInterrupt(go_on if saved else again) from None
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / RESULT


def make_accelerator(options: Any) -> Accelerator:
    """Create an Accelerator configured by the launcher, on the CPU if there is no GPU."""
    on_cpu, tracker = not torch.accelerator.is_available(), getattr(options, "report_to", None)
    precision = getattr(options, "mixed_precision", None)
    if on_cpu and precision == "fp16":
        raise ValueError("--mixed-precision fp16 needs a GPU; on a CPU use bf16 or no.")
    if tracker and importlib.util.find_spec(tracker) is None:  # accelerate would ignore it silently
        raise ValueError(f"--report-to {tracker}: the package is not installed. Run pip install {tracker}.")
    return Accelerator(
        cpu=on_cpu,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            getattr(options, "accumulate", 1), sync_with_dataloader=False
        ),
        # random features are the same on all processes, so buffers need no broadcast
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        log_with=tracker,
        project_dir=options.output,
    )


def quiet(accelerator: Accelerator) -> None:
    """Silence messages and progress bars of libraries, and warnings that do not concern recipes."""
    warnings.filterwarnings("ignore", "Without training")  # by patch_model
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # there is no replacement yet
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not accelerator.is_main_process or not sys.stderr.isatty():
        datasets.disable_progress_bars()


def command(accelerator: Accelerator) -> list[str]:
    """Return the command line of this run, without the paths of Python and of the script."""
    launcher = ["python"]
    if accelerator.num_processes > 1:
        cpu = ["torchrun", "--nproc_per_node"]
        launcher = cpu if accelerator.device.type == "cpu" else ["accelerate", "launch", "--num_processes"]
        launcher = [*launcher, str(accelerator.num_processes)]
    return [*launcher, Path(sys.argv[0]).name, *sys.argv[1:]]


def check_output(options: CommonOptions) -> bool:
    """Return whether the run is already finished. Raises ValueError if the output folder must not be written to.

    Folders that contain other files than those of a run are refused, and so are inputs inside the output folder.
    """
    output = Path(options.output)
    check_writable(output)
    for name in ("model", "tokenizer", "distill", "data"):
        given = getattr(options, name, None)
        if given and Path(given).exists() and Path(given).resolve().is_relative_to(output.resolve()):
            raise ValueError(
                f"{flag(name)} {given} is inside --output {output}, which this run writes to. Choose another --output."
            )
    if not output.exists() or not any(not path.name.startswith(".") for path in output.iterdir()):
        return False
    if not (output / RUN).exists():
        raise ValueError(
            f"--output {output} is not empty and was not written by a recipe (no {RUN}). Choose another one."
        )
    if options.overwrite:
        return False
    finished = (output / RESULT).exists()
    if not options.resume:
        found = "a finished run. Choose" if finished else "an unfinished run. Continue it with --resume, choose"
        raise ValueError(f"{output} contains {found} another --output, or delete it with --overwrite.")
    before, now = json.loads((output / RUN).read_text(encoding="utf-8")), dataclasses.asdict(options)
    if name := first_difference(before, now):
        raise ValueError(
            f"--resume: the run in {output} began with {flag(name)} {before.get(name)!r}, not {now[name]!r}. Give the "
            "same options again, or choose another --output."
        )
    return finished


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first option that differs between two runs, except those in FREE."""
    return next((name for name in now if name not in FREE and before.get(name) != now[name]), None)


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: GPU allocations, or the resident set on a CPU (0 if unknown)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes("VmHWM")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` at the end, unless an error is raised."""
    partial = target.with_name(PARTIAL + target.name)
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(target, ignore_errors=True)
    os.rename(partial, target)
