"""Attention kinds × tasks × seeds × processes × lengths, from one YAML file, and a report of what they cost and buy.

    python recipes/compare.py recipes/compare/accuracy.yaml --set data=DIR --set models=DIR --output compare_out

Runs that have a result are not made again, so the same command goes on after an interruption. `comparison/
configuration.py` explains the file; the report is made from OUTPUT/results and nothing else.
"""

from training.messages import script  # isort: skip

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from comparison.best import best_checkpoint
from comparison.launch import Failure, collect, launch, outcome, unfinished
from comparison.plan import Plan, Run, read_plan
from comparison.summary import read_summary
from comparison.tables import overview_table, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hf_rfattn.results import Heading, print_blocks

NOTE = 60  # characters of a run's last line beside the bar


@script("The same command continues from here.")
def main(
    config: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="What to compare.")],
    output: Annotated[Path, typer.Option(help="Folder for runs, results and report.")] = Path("compare_out"),
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A variable of the file.")
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Make the report from what is there.")] = False,
    redo: Annotated[bool, typer.Option("--redo", help="Make results again that other options have made.")] = False,
) -> None:
    """Compare kinds of attention by fine-tuning a model with each, and report accuracy, speed and memory."""
    console = Console(highlight=False)
    failures: list[Failure] = []
    if not report_only:
        plan = read_plan(config, output.resolve(), variables(assignments or []))
        left = unfinished(plan, output.resolve(), redo)
        failures = run_all(plan, left, output.resolve(), console)
    finish(output, console)
    for failure in failures:
        console.print(f"[bold red]Failed:[/] {failure.run.name}", soft_wrap=True)
    if failures:
        console.print(f"{len(failures)} of the runs failed and are missing above; the same command tries them again.")
        sys.exit(1)


def variables(assignments: list[str]) -> dict[str, str]:
    for each in assignments:
        if "=" not in each:
            raise ValueError(f"--set {each!r} is no assignment; write NAME=VALUE.")
    return dict(each.split("=", 1) for each in assignments)


def run_all(plan: Plan, left: list[Run], output: Path, console: Console) -> list[Failure]:
    """Every run that is left; returns those that failed. Ctrl-C ends the run at hand and loses nothing else."""
    console.print(
        f"{plan.title}: {len(plan.runs)} runs, {len(left)} to make, in {output}", soft_wrap=True, markup=False
    )
    signal.signal(signal.SIGTERM, _interrupt)
    failures: list[Failure] = []
    columns = (
        BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", style="dim", markup=False),
    )  # fmt: skip
    # the speed of the bar is that of the last hour, since a run may take many minutes
    with Bar(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=3600) as bar:
        task = bar.add_task("", total=len(left), note="")
        for i, run in enumerate(left):
            bar.update(task, description=run.name)
            started = time.monotonic()
            if run.needs in [failure.run.name for failure in failures]:
                failure: Failure | None = Failure(run, f"it needs {run.needs}, which failed")
            else:
                failure = launch(run, output, lambda line: bar.update(task, note=line[-NOTE:]))
            if failure is None:
                seconds = round(time.monotonic() - started)
                said = f"{outcome(collect(plan, run, output))} in {timedelta(seconds=seconds)}"
            else:
                failures.append(failure)
                said = f"FAILED: {failure.reason}"
            console.print(f"[{i + 1}/{len(left)}] {run.name}: {said}", soft_wrap=True, markup=False)
            bar.update(task, advance=1, note="")
    return failures


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def finish(output: Path, console: Console) -> None:
    """The report, its first table, and where everything is."""
    summary = read_summary(output / "results")
    written = write_report(summary, output)
    if summary["accuracy"]:
        print_blocks([Heading(summary["title"]), overview_table(summary)], console)
    for path in written:
        console.print(f"Written: {path}", soft_wrap=True, markup=False)
    best = best_checkpoint(summary, output)
    if best:
        console.print(f"Best linear attention: {best.row}, {best.folder} (its card: README.md there)", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
