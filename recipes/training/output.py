"""The folder of a run: whether it may be used, and what a resumed run must have in common with it.

OUTPUT/run.json       the options of the run
OUTPUT/state/         states, while the run is not finished
OUTPUT/transfer/      the state of attention transfer, likewise
OUTPUT/.tokenizer/    the tokenizer that --from-scratch has trained, likewise
OUTPUT/model/         the model that was kept, with its tokenizer; patched ones with card and results
OUTPUT/result.json    written last: it is there if and only if the run is finished
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_rfattn.results import write_result

from .options import CommonOptions, flag

RUN, MODEL, RESULT, STATES, TRANSFER = "run.json", "model", "result.json", "state", "transfer"
TOKENIZER = ".tokenizer"  # hidden: it is trained before the folder is known to be used
PARTIAL = "partial-"
FREE = {  # what may differ between a run and its continuation, since it does not change what is learnt
    "resume", "overwrite", "accumulate", "eval_batch_size", "workers", "log_every", "save_every", "report_to",
    "push_to_hub", "output", "model_name", "model_license", "data_name", "gradient_checkpointing",
}  # fmt: skip


def check_output(options: CommonOptions) -> bool:
    """Raise if the folder must not be used; return whether the run there is finished already.

    A run deletes only what runs have written: a folder with other files is refused, and so are inputs inside it.
    """
    output = Path(options.output)
    for name in ("model", "tokenizer", "init", "distill", "data"):
        given = getattr(options, name, None)
        if given and Path(given).exists() and Path(given).resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{flag(name)} {given} lies inside --output {output}, which this run writes to.")
    if not output.exists() or not any(not path.name.startswith(".") for path in output.iterdir()):
        return False
    if not (output / RUN).exists():
        raise ValueError(
            f"--output {output} is not empty and was not written by a recipe (it has no {RUN}), so nothing in it is "
            "changed. Choose a new or empty folder."
        )
    before, now = json.loads((output / RUN).read_text(encoding="utf-8")), dataclasses.asdict(options)
    if options.overwrite:
        return False
    finished = (output / RESULT).exists()
    if not options.resume:
        state = "a finished run" if finished else "an unfinished run, which --resume continues"
        raise ValueError(f"{output} holds {state}. Choose another --output, or --overwrite it.")
    if name := first_difference(before, now):
        raise ValueError(
            f"--resume: the run in {output} began with {flag(name)} {before.get(name)!r}, not {now[name]!r}. Give the "
            "same options again, or choose another --output."
        )
    return finished


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first option that makes two runs different ones."""
    return next((name for name in now if name not in FREE and before.get(name) != now[name]), None)


def open_output(options: CommonOptions) -> None:
    """Make the folder, remove what --overwrite gives up, and note the options. For the main process."""
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    if options.overwrite:
        for name in (STATES, MODEL, TRANSFER):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / RESULT).unlink(missing_ok=True)
    write_result(dataclasses.asdict(options), output / RUN)


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


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which replaces the target if nothing fails."""
    partial = target.with_name(PARTIAL + target.name)
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(target, ignore_errors=True)
    os.rename(partial, target)
