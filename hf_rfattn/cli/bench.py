"""`hf-rfattn bench …`: one command a benchmark. What they need is imported when they run."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .errors import errors_without_traceback, parse_choices, parse_numbers

app = typer.Typer(name="bench", help="Measure speed and memory on this machine.", no_args_is_help=True)

CONTEXTS, BATCHES = "1024,4096,16384,32768", "1,4"
COMPILE_LENGTHS = "128,256,384,512"
MODEL_LENGTHS = "128,512,1024,2048,4096"
LENGTHS, FEATURES = "128,256,384,512,768,1024,2048,4096,8192,16384", "64,128,256"
DIRECTIONS = {"bidirectional": False, "causal": True}
PASSES = {"forward": False, "training": True}

Device = Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of torch; by default as many as it takes.")]
MaxSeconds = Annotated[
    float, typer.Option(min=0, help="For all repetitions of one measurement; what takes longer gets fewer.")
]
Patience = Annotated[
    float,
    typer.Option(min=0, help="Seconds, in all, to wait for other processes and to repeat what they disturbed."),
]


def _command(context: typer.Context) -> str:
    """What was typed, without the folder of the output: it makes a result again."""
    words = ["hf-rfattn", "bench", str(context.info_name)]
    for option in context.command.params:
        name, value = str(option.name), context.params.get(str(option.name))
        source = context.get_parameter_source(name)
        if name == "output" or source is None or source.name != "COMMANDLINE":
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += [option.opts[0]] if each is True else [option.opts[0], str(each)]
    return shlex.join(words)


@app.callback()
def benchmarks() -> None:
    """Measure speed and memory on this machine."""


@app.command()
def decode(
    context: typer.Context,
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
    device: Device = "cpu",
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Timed in each repetition.")] = 8,
    patience: Patience = 0,
    output: Annotated[Path, typer.Option(help="Folder for decode.json and decode.png.")] = Path("bench_out"),
    seed: Annotated[int, typer.Option(help="Of weights, tokens, cache contents and random features.")] = 0,
) -> None:
    """Time and memory of generating one token, by length of context: softmax and its KV cache, and each mechanism."""
    with errors_without_traceback():
        import transformers

        from ..bench.decode import Settings, measure_decode
        from ..bench.decode_report import plot, tables
        from ..results import without_folders, write_result

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        settings = Settings(
            contexts=parse_numbers("--contexts", contexts, CONTEXTS),
            batches=parse_numbers("--batches", batches, BATCHES),
            attention=_names(attention),
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
        write_result(without_folders({**result, "command": _command(context)}), output / "decode.json")
        plot(result).savefig(output / "decode.png", dpi=150)
    for table in tables(result):
        console.print(table)
    for cell in result["cells"]:
        if "skipped" in cell:
            where = f"{cell['attention']}, context {cell['context']:,}, batch {cell['batch']}"
            console.print(f"Not measured: {where}: {cell['skipped']}", highlight=False)
    _say_what_happened(result, [output / "decode.json", output / "decode.png"], console)


@app.command()
def ops(
    context: typer.Context,
    lengths: Annotated[str, typer.Option(help="Tokens.")] = LENGTHS,
    features: Annotated[str, typer.Option(help="Random features M, for mechanisms that let one choose.")] = FEATURES,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A mechanism of `hf-rfattn list`, or several between commas; favor+ by default."),
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Of float32, bfloat16 and float16.")] = "float32,bfloat16",
    directions: Annotated[str, typer.Option(help="Of bidirectional and causal.")] = "bidirectional,causal",
    passes: Annotated[str, typer.Option(help="Of forward (no gradients) and training (forward and backward).")] = (
        "forward,training"
    ),
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 12,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    peers: Annotated[
        bool, typer.Option("--peers", help="performer-pytorch and fast-transformers too; see `make peers`.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 24,
    max_seconds: MaxSeconds = 1.5,
    memory_length: Annotated[
        int, typer.Option(min=0, help="Tokens of the training step whose memory is measured; 0 for none.")
    ] = 65536,
    patience: Patience = 0,
    output: Annotated[Path, typer.Option(help="Folder for ops.json (ops_peers.json) and plots.")] = Path("bench_out"),
    seed: Annotated[int, typer.Option(help="Of inputs and random features.")] = 0,
) -> None:
    """Time of one attention layer by length: mechanisms, softmax, the matrix products alone as the limit, and peers."""
    with errors_without_traceback():
        from ..bench.ops import Settings, measure_ops
        from ..bench.ops_report import plot, tables
        from ..results import without_folders, write_result

        settings = Settings(
            lengths=parse_numbers("--lengths", lengths, LENGTHS),
            features=parse_numbers("--features", features, FEATURES),
            attention=_names(attention) or ["favor+"],
            dtypes=_names([dtypes]),
            causal=parse_choices("--directions", directions, DIRECTIONS),
            training=parse_choices("--passes", passes, PASSES),
            batch=batch,
            heads=heads,
            head_dim=head_dim,
            peers=peers,
            device=device,
            threads=threads,
            repetitions=repetitions,
            max_seconds=max_seconds,
            memory_length=memory_length,
            patience=patience,
            seed=seed,
        )
        console = Console()
        with _progress(console) as progress:
            result = measure_ops(settings, progress)
        name = "ops_peers" if peers else "ops"
        files = [output / f"{name}.json"]
        write_result(without_folders({**result, "command": _command(context)}), files[0])
        for dtype in settings.dtypes:
            files.append(output / (f"{name}.png" if dtype == settings.dtypes[0] else f"{name}_{dtype}.png"))
            plot(result, dtype).savefig(files[-1], dpi=150)
    for table in tables(result):
        console.print(table)
    _say_what_happened(result, files, console)


@app.command()
def model(
    context: typer.Context,
    lengths: Annotated[str, typer.Option(help="Tokens of each input.")] = MODEL_LENGTHS,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A mechanism of `hf-rfattn list`, or several between commas; favor+ by default, or what a patched "
            "checkpoint was saved with. Softmax always."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder, a model on the Hub, or bert or gpt2 for random weights in that shape; both by default."
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="What to call the model in results; cards want its name on the Hub.")
    ] = None,
    passes: Annotated[str, typer.Option(help="Of forward (no gradients) and training (a step of AdamW).")] = (
        "forward,training"
    ),
    batch: Annotated[int, typer.Option(min=0, help="Inputs at once; 0 for as many as --tokens allow.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Of all inputs of a step, with --batch 0.")] = 4096,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each measurement; the median counts.")] = 6,
    max_seconds: MaxSeconds = 10,
    patience: Patience = 0,
    output: Annotated[
        Path, typer.Option(help="Folder for model_TYPE.json, its plot, and speed_TYPE_ATTENTION.json for model cards.")
    ] = Path("bench_out"),
    seed: Annotated[int, typer.Option(help="Of weights, tokens and random features.")] = 0,
) -> None:
    """Time, throughput and memory of whole models by length: inference and a training step, softmax and mechanisms."""
    with errors_without_traceback():
        import transformers

        from ..bench.model import SHAPES, Settings, measure_model, speed_documents
        from ..bench.model_report import plot, tables
        from ..results import without_folders, write_result

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        chosen = _names(model) or list(SHAPES)
        every = [
            Settings(
                lengths=parse_numbers("--lengths", lengths, MODEL_LENGTHS),
                attention=_names(attention),
                model=name,
                base_model=base_model,
                training=parse_choices("--passes", passes, PASSES),
                batch=batch or None,
                tokens=tokens,
                dtype=dtype,
                device=device,
                threads=threads,
                repetitions=repetitions,
                max_seconds=max_seconds,
                patience=patience,
                seed=seed,
            )
            for name in chosen
        ]
        console = Console()
        for settings in every:
            with _progress(console) as progress:
                result = measure_model(settings, progress)
            kind = result["model"]["type"]
            files = [output / f"model_{kind}.json", output / f"model_{kind}.png"]
            write_result(without_folders({**result, "command": _command(context)}), files[0])
            plot(result).savefig(files[1], dpi=150)
            for name, document in speed_documents(result).items():
                files.append(output / f"speed_{kind}_{name.replace(' ', '_')}.json")
                write_result(document, files[-1])
            for table in tables(result):
                console.print(table)
            _say_what_happened(result, files, console)


@app.command("compile")
def compile_time(
    context: typer.Context,
    lengths: Annotated[str, typer.Option(help="Input lengths, in the order in which they come.")] = COMPILE_LENGTHS,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A mechanism of `hf-rfattn list`, or several between commas; favor+ by default."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Of torch.compile: inductor, aot_eager, eager.")] = "inductor",
    threads: Threads = None,
    output: Annotated[Path, typer.Option(help="Folder for compile.json.")] = Path("bench_out"),
    seed: Annotated[int, typer.Option(help="Of weights, tokens and random features.")] = 0,
) -> None:
    """Time of torch.compile at each new input length: softmax and mechanisms."""
    with errors_without_traceback():
        from ..bench.compile_time import Settings, measure_compile_time, table
        from ..bench.contenders import named_configs
        from ..results import write_result

        names = list(named_configs(_names(attention) or ["favor+"]))
        settings = Settings(parse_numbers("--lengths", lengths, COMPILE_LENGTHS), names, backend, threads, seed)
        console = Console()
        with _progress(console) as progress:
            result = measure_compile_time(settings, progress)
        write_result({**result, "command": _command(context)}, output / "compile.json")
    console.print(table(result))
    console.print(f"Written: {output / 'compile.json'}", highlight=False, soft_wrap=True)


def _names(options: list[str] | None) -> list[str]:
    """Names between commas, each once, of an option that may be given several times."""
    return list(dict.fromkeys(name.strip() for names in options or [] for name in names.split(",")))


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[float, str], None]]:
    """A bar that is told which share of the work is done, and what is being done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        yield lambda share, doing: progress.update(task, completed=share, description=doing)


def _say_what_happened(result: dict[str, Any], files: Iterable[Path], console: Console) -> None:
    """How calm the machine was, and what was written."""
    neighbours = result["neighbours"]
    if neighbours["disturbed"]:
        console.print(
            f"Other processes disturbed {neighbours['disturbed']} of {neighbours['runs']} timed runs; "
            "--patience has them repeated.",
            highlight=False,
        )
    console.print(f"Written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
