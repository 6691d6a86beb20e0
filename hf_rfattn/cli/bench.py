"""`hf-rfattn bench …`: one command per benchmark, with an option for each of its settings."""

import dataclasses
import importlib
import json
from collections.abc import Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..bench.settings import DecodeSettings, ModelSettings, OpsSettings, Settings
from .command_line import errors_without_traceback, example_of, parse_choices, parse_numbers, progress_bar, typed

app = typer.Typer(
    name="bench",
    help="Measure speed and memory: bench ops, bench model, bench decode.",
    epilog=example_of("bench ops --help"),
    no_args_is_help=True,
)

Output = Annotated[Path, typer.Option(file_okay=False, help="Folder for results (JSON) and plots.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Field = Any  # of dataclasses


def _add(name: str, settings: type[Settings], description: str, example: str) -> None:
    """Add the command for the module `bench.NAME`, which is imported when the command runs."""
    shared = {field.name for field in dataclasses.fields(Settings)}
    fields = sorted(dataclasses.fields(settings), key=lambda field: field.name in shared)  # shared ones last

    def command(context: typer.Context, output: Path, as_json: bool, **given: Any) -> None:
        with errors_without_traceback():
            chosen = settings(**{field.name: _parse(field, given[field.name]) for field in fields})
            _run(importlib.import_module(f"hf_rfattn.bench.{name}"), chosen, output, typed(context), as_json)

    keyword = Parameter.KEYWORD_ONLY
    parameters = [
        Parameter("context", keyword, annotation=typer.Context),
        *(Parameter(f.name, keyword, default=_default(f), annotation=_annotation(f)) for f in fields),
        Parameter("output", keyword, default=Path("bench_out"), annotation=Output),
        Parameter("as_json", keyword, default=False, annotation=AsJson),
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=description, epilog=example_of(f"bench {name} {example}"))(command)


def _annotation(field: Field) -> Any:
    """Type of an option. Lists are separated by commas, or the option is repeated."""
    option = typer.Option(help=field.metadata["help"], min=field.metadata.get("min"))
    return Annotated[list[str] if "Sequence" in str(field.type) else field.type, option]


def _default(field: Field) -> Any:
    if "choices" in field.metadata:
        return [name for name, value in field.metadata["choices"].items() if value in field.default]
    return [str(value) for value in field.default] if "Sequence" in str(field.type) else field.default


def _parse(field: Field, given: Any) -> Any:
    if "Sequence" not in str(field.type):
        return given
    flag, text = f"--{field.name.replace('_', '-')}", ",".join(given)
    if "choices" in field.metadata:
        return parse_choices(flag, text, field.metadata["choices"]) if text else ()
    if field.type == Sequence[int]:
        return parse_numbers(flag, text, ",".join(_default(field)))
    return list(dict.fromkeys(name.strip() for name in text.split(","))) if text else []


def _run(benchmark: Any, settings: Settings, output: Path, command: str, as_json: bool) -> None:
    """Measure, write the result, its plots and the documents for model cards, and print its tables."""
    import matplotlib.figure  # noqa: F401  # raises an error before the measurement if it is missing
    import transformers

    from ..results.documents import check_writable, without_folders, write_result
    from ..results.report import print_blocks, write_images

    check_writable(output)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with progress_bar("loading") as show:
        result = benchmark.measure(settings, lambda share, doing: show(doing, share))
    name = result["kind"].removeprefix("bench ")
    if isinstance(settings, ModelSettings):
        name += f"_{result['model']['type']}"
    blocks = benchmark.report(result, name)
    files = [output / f"{name}.json"]
    document = without_folders({**result, "command": command})
    write_result(document, files[0])
    files += write_images(blocks, output)
    if isinstance(settings, ModelSettings):
        for attention, speed in benchmark.speed_documents(result).items():
            files.append(output / f"{name.replace('model', 'speed', 1)}_{attention.replace(' ', '_')}.json")
            write_result({**speed, "command": document["command"]}, files[-1])
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console()
    print_blocks(blocks, console)
    console.print(f"Written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)


_add("ops", OpsSettings, "Time one attention layer by sequence length.", "--attention favor+,fmm --lengths 512,4096")
_add(
    "model", ModelSettings, "Time and memory of a whole model by sequence length.",
    "--model bert-base-uncased --attention favor+",
)  # fmt: skip
_add("decode", DecodeSettings, "Time and memory per generated token by context length.", "--model gpt2 --contexts 4096")
