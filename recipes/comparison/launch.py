"""Starts runs, each in processes of its own, and collects their results.

OUTPUT/runs/NAME/           what the recipe writes there
OUTPUT/logs/NAME.txt        what it has printed
OUTPUT/results/NAME.json    its result, with its place in the report: there if and only if the run is finished
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

TAIL = 6  # lines of a failed run's log that are shown


def result_file(output: Path, run: Run) -> Path:
    return output / RESULTS / f"{run.name}.json"


def unfinished(plan: Plan, output: Path, redo: bool) -> list[Run]:
    """Runs that are to be made: those without a result, and what they need first.

    A result that was made with other options raises, unless it is to be made again.
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
            f"{path} was made with another {flag(other)}. --redo makes it again; or choose another --output."
        )
    return not other and (run.place is not None or (folder_of(output, run.name) / MODEL).exists())


def _difference(run: Run, output: Path) -> str | None:
    """The first option that differs from those a run was made with; None if there is no such run."""
    path = folder_of(output, run.name) / RUN
    now = dataclasses.asdict(run.options)
    return first_difference(read_result(path), now) if path.exists() else None


def launch_command(run: Run, *extra: str) -> tuple[list[str], dict[str, str]]:
    """The words that start a run with the launcher that fits, and the environment it needs."""
    path = [str(run.script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment, launcher = {"PYTHONPATH": os.pathsep.join(path)}, []
    if torch.accelerator.is_available():
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(run.processes)]
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
        if run.threads or "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(run.threads or max(1, (os.cpu_count() or 1) // run.processes))
        if run.processes > 1:  # which accelerate's launcher does not start on a CPU
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run.processes)]
    return [sys.executable, *launcher, str(run.script), *run.words, *extra], environment


def launch(run: Run, output: Path) -> str | None:
    """Run it to its end and return why it failed, or None. An unfinished run with the same options is resumed."""
    folder, log = folder_of(output, run.name), output / "logs" / f"{run.name}.txt"
    begun = (folder / RUN).exists() and not result_file(output, run).exists() and not _difference(run, output)
    words, environment = launch_command(run, "--resume" if begun else "--overwrite")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        code = subprocess.run(words, env={**os.environ, **environment}, **options).returncode
    if code or not (folder / RESULT).exists():
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join([f"exit code {code}; the end of {log}:", *lines[-TAIL:]])
    return None


def collect(plan: Plan, run: Run, output: Path) -> dict[str, Any]:
    """Put a finished run's result where the report reads it, without folders of this machine."""
    folder = folder_of(output, run.name)
    document = without_folders(read_result(folder / RESULT))
    if run.place is not None:
        document[PLACE] = {"title": plan.title, **run.place}
        if not plan.keep_models:
            shutil.rmtree(folder / MODEL, ignore_errors=True)
    write_result(document, result_file(output, run))
    return document
