"""The folder of a run: whether it may be used, and what a resumed run must have in common with it.

OUTPUT/run.json       the options of the run
OUTPUT/state/         states, while the run is not finished
OUTPUT/best/          the best model so far, likewise
OUTPUT/transfer/      the state of attention transfer, likewise
OUTPUT/.tokenizer/    the tokenizer that --from-scratch has trained, likewise
OUTPUT/model/         the model that was kept, with its tokenizer; patched ones with card and results
OUTPUT/result.json    written last: it is there if and only if the run is finished
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_rfattn.results import in_bytes, write_result

from .options import RunOptions, flag

RUN, MODEL, BEST, RESULT = "run.json", "model", "best", "result.json"
STATES, PARTIAL, TRANSFER = "state", "partial-", "transfer"
TOKENIZER = ".tokenizer"  # hidden: it is trained before the folder is known to be used
LOCK = ".lock"
# what may differ between a run and its continuation, since it does not change what is learnt
FREE = {
    "resume", "overwrite", "accumulate", "eval_batch_size", "workers", "log_every", "save_every", "report_to",
    "push_to_hub", "output", "model_name", "model_license", "data_name", "gradient_checkpointing",
}  # fmt: skip
INPUTS = ("model", "tokenizer", "init", "distill", "data")  # options that may name a folder to read
SLACK = 64 * 2**20


def check_output(options: RunOptions) -> bool:
    """Raise if the folder must not be used; return whether the run there is finished already.

    A run deletes only what runs have written: a folder with other files in it is refused, and so are inputs inside it.
    """
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {options.output!r} is a file.")
    for name in INPUTS:
        given = Path(getattr(options, name, None) or "").resolve()
        if getattr(options, name, None) and given.exists() and given.is_relative_to(output.resolve()):
            raise ValueError(
                f"{flag(name)} {getattr(options, name)} lies inside --output {output}, which this run writes to. "
                "Choose another --output."
            )
    if not output.exists() or not any(not path.name.startswith(".") for path in output.iterdir()):
        return False
    if not (output / RUN).exists():
        raise ValueError(
            f"--output {output} is not empty and was not written by a recipe (it has no {RUN}), so nothing in it is "
            "changed. Choose a new or empty folder."
        )
    read_run(output / RUN)
    if options.overwrite:
        return False
    finished = (output / RESULT).exists()
    if options.resume:
        check_same_run(output / RUN, options)
        return finished
    if finished:
        raise ValueError(f"{output} holds a finished run. Choose another --output, or --overwrite it.")
    raise ValueError(f"{output} holds an unfinished run: --resume continues it, --overwrite starts again.")


def read_run(path: Path) -> dict[str, Any]:
    """The options of the run in a folder."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not JSON, or not text
        document = None
    if not isinstance(document, dict) or "output" not in document:
        raise ValueError(
            f"{path} is not the record of a run (empty, damaged, or of another program), so {path.parent} can be "
            "neither resumed nor overwritten. Delete the folder, or choose another --output."
        )
    return document


def check_same_run(path: Path, options: RunOptions) -> None:
    """A run goes on with the options it began with."""
    if not path.exists():
        return
    before, now = read_run(path), dataclasses.asdict(options)
    name = first_difference(before, now)
    if name is not None:
        raise ValueError(
            f"--resume: the run in {path.parent} began with {flag(name)} {before.get(name)!r}, not {now[name]!r}. "
            "Give the same options again, or choose another --output."
        )


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first option that makes two runs different ones."""
    return next((name for name in now if name not in FREE and before.get(name) != now[name]), None)


def latest_state(output: Path) -> Path | None:
    """The last complete state in a run's folder."""
    return max((output / STATES).glob("step-*"), default=None)


def how_to_continue(output: Path) -> str:
    """After an interruption."""
    if not (output / RUN).exists() or (output / RESULT).exists():
        return ""
    state = latest_state(output)
    if state is not None:
        return f"The same command with --resume continues from step {int(state.name.removeprefix('step-'))}."
    if (output / TRANSFER).exists():
        return "The same command with --resume continues the attention transfer."
    return "The same command with --resume starts it again; with --save-every N it would continue."


def output_lock(options: RunOptions) -> FileLock:
    """What `open_output` takes, and whoever called this must release. The system releases it for a killed process."""
    return FileLock(Path(options.output) / LOCK, timeout=0)


def open_output(options: RunOptions, lock: FileLock) -> None:
    """Make the folder, empty it of what --overwrite gives up, and note the options. For the main process."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another run is writing to {output} at this moment (killing a launcher may leave its processes behind). "
            "Wait for it or end it, or choose another --output."
        ) from None
    if options.overwrite:
        for name in (STATES, BEST, MODEL, TRANSFER):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / RESULT).unlink(missing_ok=True)
    write_result(dataclasses.asdict(options), output / RUN)


def check_shared(output: Path) -> None:
    """For every process: what the main one has opened must be there."""
    if not (output / RUN).exists():
        raise ValueError(f"--output {output} is not the same folder on all machines; choose one that all of them see.")


def check_space(output: Path, parameters: int, options: RunOptions) -> None:
    """Refuse to begin what the disk cannot hold: Adam's state is twice the weights, and two states meet at a save."""
    weights = 4 * parameters
    models = 2 if options.keep == "best" else 1
    needed = models * weights + (2 * 3 * weights if options.save_every else 0) + SLACK
    there = next(folder for folder in [output.resolve(), *output.resolve().parents] if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"--output {options.output}: this run may write {in_bytes(needed)}, but the disk has {in_bytes(free)}. "
            "Choose another disk" + (", or leave out --save-every." if options.save_every else ".")
        )
    if not os.access(there, os.W_OK):
        raise ValueError(f"--output {options.output}: {there} is not writable.")
