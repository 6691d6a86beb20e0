"""Compare attention mechanisms on tasks, with several seeds, from one YAML file: scores, speed and memory.

    python recipes/compare.py recipes/compare/accuracy.yaml --set data=DIR --output compare_out

Finished runs are not repeated, so the same command resumes after an interruption. `comparison/plan.py` documents the
file. Each run is a separate process. The report is generated from OUTPUT/results only.

OUTPUT/runs/NAME/           output folder of the recipe
OUTPUT/logs/NAME.txt        its console output
OUTPUT/results/NAME.json    its result, with its position in the report; exists only if the run is finished
"""

from training.messages import script  # isort: skip

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from comparison.plan import Plan, Run, folder_of, read_plan
from comparison.report import PLACE, read_comparison, write_report
from rich.console import Console
from training.options import flag
from training.session import MODEL, RESULT, RUN, first_difference

from hf_rfattn import write_card
from hf_rfattn.hub.scores import overview
from hf_rfattn.results.documents import RESULTS, read_result, without_folders, write_result
from hf_rfattn.results.report import number, print_blocks
from hf_rfattn.results.schema import read_results

TAIL = 6  # number of lines shown from the log of a failed run


@script("Run the same command again to resume.")
def main(
    config: Annotated[
        Path, typer.Argument(metavar="FILE.yaml", help="Plan of the comparison, such as recipes/compare/accuracy.yaml.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for runs, results and report.")] = Path("compare_out"),
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Value of a variable in the file.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Only rewrite the report from the results.")
    ] = False,
    redo: Annotated[
        bool, typer.Option("--redo", help="Repeat runs whose results were made with other options.")
    ] = False,
) -> None:
    """Compare attention mechanisms on tasks: scores, speed and memory."""
    console, failed = Console(highlight=False), []
    if not report_only:
        plan = read_plan(config, output.resolve(), dict(each.partition("=")[::2] for each in assignments or []))
        left = unfinished(plan, output.resolve(), redo)
        typer.echo(f"{plan.title}: {len(plan.runs)} runs, {len(left)} left, in {output}")
        failed = run_all(plan, left, output.resolve(), console)
        write_cards(output)
    title, tables = read_comparison(output / RESULTS)
    written = write_report(title, tables, output)
    print_blocks([f"## {title}", overview(tables)], console)
    for path in written:
        typer.echo(f"Written: {path}")
    if failed:
        typer.echo(
            f"{len(failed)} run(s) failed and are missing above: {', '.join(failed)}. Run the same command to retry."
        )
        sys.exit(1)


def run_all(plan: Plan, left: list[Run], output: Path, console: Console) -> list[str]:
    """Execute runs and return the names of those that failed. Ctrl-C stops the current run, which can be resumed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also stops the current run
    failed: list[str] = []
    for i, run in enumerate(left):
        started = time.monotonic()
        if run.needs in failed:
            reason: str | None = f"it needs {run.needs}, which failed"
        else:
            with console.status(run.name):
                reason = launch(run, output)
        if reason is None:
            document = collect(plan, run, output)
            name, seconds = document["main_metric"], timedelta(seconds=round(time.monotonic() - started))
            said = f"{name} {number(document['metrics'][name]['value'])} in {seconds}"
        else:
            failed.append(run.name)
            said = f"FAILED: {reason}"
        typer.echo(f"[{i + 1}/{len(left)}] {run.name}: {said}")
    return failed


def result_file(output: Path, run: Run) -> Path:
    return output / RESULTS / f"{run.name}.json"


def unfinished(plan: Plan, output: Path, redo: bool) -> list[Run]:
    """Return the runs without a result, and the runs that they depend on.

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


def write_cards(output: Path) -> None:
    """Add the results of softmax and of all other comparable runs to the card of each patched model."""
    results = read_results(output / RESULTS)
    for own in results:
        folder = folder_of(output, Path(own.file).stem) / MODEL
        if (folder / "README.md").exists():
            for alone in (folder / RESULTS).glob("*.json"):
                alone.unlink()
            for each in results:
                if each.measured_on == own.measured_on and each.processes == own.processes:
                    write_result(each.document, folder / RESULTS / each.file)
            write_card(folder)


if __name__ == "__main__":
    typer.run(main)
