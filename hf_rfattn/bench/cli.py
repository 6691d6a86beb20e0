"""`hf-rfattn bench …`: one command a benchmark. What they need is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..commands import errors_without_traceback, parse_numbers

app = typer.Typer(name="bench", help="Measure speed and memory on this machine.", no_args_is_help=True)

CONTEXTS, BATCHES = "1024,4096,16384,32768", "1,4"


@app.callback()
def benchmarks() -> None:
    """Measure speed and memory on this machine."""


@app.command()
def decode(
    contexts: Annotated[str, typer.Option(help="Tokens in the cache before those that are timed.")] = CONTEXTS,
    batches: Annotated[str, typer.Option(help="Sequences generated at once.")] = BATCHES,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A mechanism of `hf-rfattn list`, or several between commas; all by default. Softmax always."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder or a model on the Hub; by default one shaped like gpt2, with random weights."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; by default as many as it takes.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Timed in each repetition.")] = 8,
    patience: Annotated[
        float,
        typer.Option(min=0, help="Seconds, in all, to wait for other processes and to repeat what they disturbed."),
    ] = 0,
    output: Annotated[Path, typer.Option(help="Folder for decode.json and decode.png.")] = Path("bench_out"),
    seed: Annotated[int, typer.Option(help="Of weights, tokens, cache contents and random features.")] = 0,
) -> None:
    """Time and memory of generating one token, by length of context: softmax and its KV cache, and each mechanism."""
    with errors_without_traceback():
        import transformers

        from .decode import Settings, measure_decode
        from .decode_report import plot, tables
        from .results import write_result

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        settings = Settings(
            contexts=parse_numbers("--contexts", contexts, CONTEXTS),
            batches=parse_numbers("--batches", batches, BATCHES),
            attention=[name.strip() for names in attention or [] for name in names.split(",")],
            model=model,
            dtype=dtype,
            device=device,
            threads=threads,
            repetitions=repetitions,
            tokens=tokens,
            patience=patience,
            seed=seed,
        )
        console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("loading", total=settings.runs)
            result = measure_decode(settings, lambda doing: progress.update(task, advance=1, description=doing))
        write_result(result, output / "decode.json")
        plot(result).savefig(output / "decode.png", dpi=150)
    for table in tables(result):
        console.print(table)
    for cell in result["cells"]:
        if "skipped" in cell:
            where = f"{cell['attention']}, context {cell['context']:,}, batch {cell['batch']}"
            console.print(f"Not measured: {where}: {cell['skipped']}", highlight=False)
    neighbours = result["neighbours"]
    if neighbours["disturbed"]:
        console.print(
            f"Other processes disturbed {neighbours['disturbed']} of {neighbours['runs']} timed runs; "
            "--patience has them repeated.",
            highlight=False,
        )
    console.print(f"Written: {output / 'decode.json'}, {output / 'decode.png'}", highlight=False, soft_wrap=True)
