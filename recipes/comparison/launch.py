"""Starts runs in separate processes and collects their results.

OUTPUT/runs/NAME/           output folder of the recipe
OUTPUT/logs/NAME.txt        its console output
OUTPUT/results/NAME.json    its result, with its place in the report; exists only if the run is finished
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from training.options import flag
from training.session import MODEL, RESULT, RUN, first_difference

from hf_rfattn.results import RESULTS, read_result, without_folders, write_result

from .plan import Plan, Run, folder_of
from .report import PLACE

TAIL = 6  # number of lines shown from the log of a failed run


def result_file(output: Path, run: Run) -> Path:
    return output / RESULTS / f"{run.name}.json"


def unfinished(plan: Plan, output: Path, redo: bool) -> list[Run]:
    """Return the runs without a result, and the runs that these need first.

    Raises ValueError for a result with other options, unless `redo`.
    """
    left = [run for run in plan.runs if not _finished(run, output, redo)]
    needed = {run.needs for run in left}
    return [run for run in left if run.place is not None or run.name in needed]


def _finished(run: Run, output: Path, redo: bool) -> bool:
    path = result_file(output, run)
    if not path.exists():
        return False
    other = "processes" if read_result(path)["processes"] != run.processes else _difference(run, output)
    if other and not redo:
        raise ValueError(
            f"{path} was made with another {flag(other)}. Pass --redo to run it again, or choose another --output."
        )
    return not other and (run.place is not None or (folder_of(output, run.name) / MODEL).exists())


def _difference(run: Run, output: Path) -> str | None:
    """Return the first option that differs from those of the earlier run; None if there is none."""
    path = folder_of(output, run.name) / RUN
    now = dataclasses.asdict(run.options)
    return first_difference(read_result(path), now) if path.exists() else None


def launch_command(run: Run, *extra: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a run with the right launcher, and its environment variables."""
    path = [str(run.script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment, launcher = {"PYTHONPATH": os.pathsep.join(path)}, []
    if torch.accelerator.is_available():
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(run.processes)]
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
        if run.threads or "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(run.threads or max(1, (os.cpu_count() or 1) // run.processes))
        if run.processes > 1:  # accelerate's launcher does not support this on a CPU
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run.processes)]
    return [sys.executable, *launcher, str(run.script), *run.words, *extra], environment


def launch(run: Run, output: Path) -> str | None:
    """Execute a run, resuming it if it is unfinished. Returns why it failed, or None."""
    folder, log = folder_of(output, run.name), output / "logs" / f"{run.name}.txt"
    begun = (folder / RUN).exists() and not result_file(output, run).exists() and not _difference(run, output)
    words, environment = launch_command(run, "--resume" if begun else "--overwrite")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        code = subprocess.run(words, env={**os.environ, **environment}, **options).returncode
    if code or not (folder / RESULT).exists():
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join([f"exit code {code}; last lines of {log}:", *lines[-TAIL:]])
    return None


def collect(plan: Plan, run: Run, output: Path) -> dict[str, Any]:
    """Copy the result of a finished run to the folder of the report, without paths of this machine."""
    folder = folder_of(output, run.name)
    document = without_folders(read_result(folder / RESULT))
    if run.place is not None:
        document[PLACE] = {"title": plan.title, **run.place}
        if not plan.keep_models:
            shutil.rmtree(folder / MODEL, ignore_errors=True)
    write_result(document, result_file(output, run))
    return document
