"""Compare retrieval quality and speed of attention mechanisms in a pretrained embedding model, on long documents.

    make demo                             install the requirements and run this script
    python recipes/demo.py --output DIR   write a report, the models and their cards to DIR

The model, all-MiniLM-L6-v2, is installed as a Python package (requirements-demo.txt) and the documents are part of this
repository, so nothing is downloaded from the Hub. This script runs `compare.py` with compare/demo.yaml.
"""

from training.messages import script  # isort: skip

import sys
from pathlib import Path
from typing import Annotated

import compare
import typer
from comparison.plan import FOLDER, folder_of
from comparison.report import read_comparison
from rich.console import Console

from hf_rfattn.hub.scores import details
from hf_rfattn.results.report import print_blocks
from hf_rfattn.study.pretrained import DEMO, model_folder


@script("Run the same command again to resume.")
def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, models and report.")] = Path("demo_out"),
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a BERT-like model. Default: all-MiniLM-L6-v2 from requirements-demo.txt."),
    ] = None,
    documents: Annotated[int, typer.Option(help="Number of documents, at most 100.")] = 60,
) -> None:
    """Patch an embedding model and compare its retrieval quality and speed with softmax."""
    given = [f"model={model_folder(model or DEMO)}", f"documents={documents}"]
    compare.main(FOLDER / "compare" / "demo.yaml", output=output, assignments=given)
    console = Console(highlight=False)
    for table in read_comparison(output / "results")[1]:
        print_blocks([f"## {table.title}", details(table)], console)
    folder = folder_of(output, "2-048-tokens_multipole_seed_0") / "model"
    console.print(
        f"\nOpen {output / 'report.html'} for all tables and the plot. A patched model with its card is in {folder};\n"
        "after `import hf_rfattn`, SentenceTransformer(FOLDER) loads it.\n"
        "Next: python recipes/evaluate_embeddings.py --model YOUR_MODEL --attention multipole --data YOUR_BEIR_FOLDER",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(typer.run(main))
