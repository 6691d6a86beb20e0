"""Compare kinds of attention × tasks × seeds from one YAML file: scores, speed and memory.

    python recipes/compare.py recipes/compare/accuracy.yaml --set data=DIR --output compare_out

Runs that have a result are not repeated, so the same command continues after an interruption. `comparison/plan.py`
explains the file. The report is made from OUTPUT/results alone.
"""

from training.messages import script  # isort: skip

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from comparison.launch import collect, launch, unfinished
from comparison.plan import Plan, Run, folder_of, read_plan
from comparison.report import read_comparison, write_report
from rich.console import Console
from training.session import MODEL

from hf_rfattn import write_card
from hf_rfattn.hub.scores import overview
from hf_rfattn.results import RESULTS, number, print_blocks, read_results, write_result


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
        typer.echo(f"{plan.title}: {len(plan.runs)} runs, {len(left)} to make, in {output}")
        failed = run_all(plan, left, output.resolve(), console)
        write_cards(output)
    title, tables = read_comparison(output / RESULTS)
    written = write_report(title, tables, output)
    print_blocks([f"## {title}", overview(tables)], console)
    for path in written:
        typer.echo(f"Written: {path}")
    if failed:
        typer.echo(f"{len(failed)} run(s) failed and are missing above: {', '.join(failed)}. Run it again to retry.")
        sys.exit(1)


def run_all(plan: Plan, left: list[Run], output: Path, console: Console) -> list[str]:
    """Every run that is left; returns the names of those that failed. Ctrl-C ends the current run only."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the run at hand, too
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


def write_cards(output: Path) -> None:
    """The card of each patched model shows it beside softmax and the controls, not alone."""
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
