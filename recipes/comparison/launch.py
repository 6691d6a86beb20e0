"""Starts runs, each in processes of its own, and collects their results.

OUTPUT/runs/NAME/           what the recipe writes there
OUTPUT/logs/NAME.txt        what it has printed
OUTPUT/results/NAME.json    its result, with its place in the report: there if and only if the run is finished
"""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training.options import flag
from training.session import MODEL, RESULT, RUN, first_difference

from hf_rfattn.results import RESULTS, read_result, without_folders, write_result

from .plan import Plan, Run, folder_of
from .scores import PLACE

LOGS = "logs"
TAIL = 6  # lines of a failed run's log that are shown
PATIENCE = 40.0  # seconds that an interrupted run has to end by itself; torchrun gives its own processes 30


def result_file(output: Path, run: Run) -> Path:
    return output / RESULTS / f"{run.name}.json"


def unfinished(plan: Plan, output: Path, redo: bool) -> list[Run]:
    """Runs that are to be made: those without a result, and what they need first."""
    left = [run for run in plan.runs if not _finished(run, output, redo)]
    needed = {run.needs for run in left}
    return [run for run in left if run.place is not None or run.name in needed]


def _finished(run: Run, output: Path, redo: bool) -> bool:
    """A result that was made with other options raises, unless it is to be made again."""
    path = result_file(output, run)
    if not path.exists():
        return False
    document = read_result(path)
    now = without_folders({**document, "options": dataclasses.asdict(run.options)})["options"]
    before, now = {**document["options"], "processes": document["processes"]}, {**now, "processes": run.processes}
    name = first_difference(before, now)
    if name is not None and not redo:
        raise ValueError(
            f"{path} was made with {flag(name)} {before.get(name)!r}, not {now[name]!r}. --redo makes it again; or "
            "choose another --output."
        )
    return name is None and (run.place is not None or (folder_of(output, run.name) / MODEL).exists())


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


def launch(run: Run, output: Path, watch: Callable[[str], None]) -> str | None:
    """Run it to its end and return why it failed, or None; `watch` is told the last line of its log now and then.

    An unfinished run with the same options is resumed.
    """
    folder = folder_of(output, run.name)
    words, environment = launch_command(run, "--resume" if _resumes(run, output) else "--overwrite")
    log = output / LOGS / f"{run.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C comes to us, and we end all of its processes
        )
        try:
            while process.poll() is None:
                watch(last_lines(log, 1))
                time.sleep(0.2)
        finally:
            end(process)
    if process.returncode or not (folder / RESULT).exists():
        return f"exit code {process.returncode}; the end of {log}:\n{last_lines(log, TAIL)}"
    return None


def _resumes(run: Run, output: Path) -> bool:
    """Whether its folder holds an unfinished run with the same options. A result that is made again is not one."""
    path = folder_of(output, run.name) / RUN
    if result_file(output, run).exists() or not path.exists():
        return False
    return first_difference(read_result(path), dataclasses.asdict(run.options)) is None


def end(process: "subprocess.Popen[bytes]") -> None:
    """A run that is still going is asked, then made, to stop, with all processes of its launcher."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, kind)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                continue


def last_lines(log: Path, count: int) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4000))
        text = stream.read().decode(errors="replace")
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-count:])


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
