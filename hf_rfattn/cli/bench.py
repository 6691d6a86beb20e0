"""`hf-rfattn bench …`: one command a benchmark, with an option for each of its settings."""

import dataclasses
import importlib
import shlex
from collections.abc import Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..bench.settings import DecodeSettings, ModelSettings, OpsSettings, Settings
from .errors import errors_without_traceback, parse_choices, parse_numbers

app = typer.Typer(name="bench", help="Measure speed and memory on this machine.", no_args_is_help=True)

Output = Annotated[Path, typer.Option(help="Folder for the results as JSON and the plots.")]
Field = Any  # of dataclasses


def _add(name: str, settings: type[Settings], description: str) -> None:
    """Add the command of the module `bench.NAME`, which has `measure` and `report` and is imported when it runs."""
    shared = {field.name for field in dataclasses.fields(Settings)}
    fields = sorted(dataclasses.fields(settings), key=lambda field: field.name in shared)  # its own come first

    def command(context: typer.Context, output: Path, **given: Any) -> None:
        with errors_without_traceback():
            chosen = settings(**{field.name: _parse(field, given[field.name]) for field in fields})
            _run(importlib.import_module(f"hf_rfattn.bench.{name}"), chosen, output, _command(context))

    keyword = Parameter.KEYWORD_ONLY
    parameters = [
        Parameter("context", keyword, annotation=typer.Context),
        *(Parameter(f.name, keyword, default=_default(f), annotation=_annotation(f)) for f in fields),
        Parameter("output", keyword, default=Path("bench_out"), annotation=Output),
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=description)(command)


def _annotation(field: Field) -> Any:
    """The type of an option: names may be given one by one or between commas, other lists as one text with commas."""
    option = typer.Option(help=field.metadata["help"], min=field.metadata.get("min"))
    listed = field.type == Sequence[str] and "choices" not in field.metadata
    return Annotated[list[str] if listed else str if "Sequence" in str(field.type) else field.type, option]


def _default(field: Field) -> Any:
    if "choices" in field.metadata:
        return ",".join(name for name, value in field.metadata["choices"].items() if value in field.default)
    if field.type == Sequence[int]:
        return ",".join(map(str, field.default))
    return list(field.default) if field.type == Sequence[str] else field.default


def _parse(field: Field, given: Any) -> Any:
    flag = f"--{field.name.replace('_', '-')}"
    if "choices" in field.metadata:
        return parse_choices(flag, given, field.metadata["choices"]) if given else ()
    if field.type == Sequence[int]:
        return parse_numbers(flag, given, _default(field))
    if field.type == Sequence[str]:
        return list(dict.fromkeys(name.strip() for names in given for name in names.split(",")))
    return given


def _command(context: typer.Context) -> str:
    """What was typed, without the folder of the output: it makes a result again."""
    words = ["hf-rfattn", "bench", str(context.info_name)]
    for option in context.command.params:
        name, value = str(option.name), context.params.get(str(option.name))
        source = context.get_parameter_source(name)
        if name != "output" and source is not None and source.name == "COMMANDLINE":
            for each in value if isinstance(value, (list, tuple)) else [value]:
                words += [option.opts[0], str(each)]
    return shlex.join(words)


def _run(benchmark: Any, settings: Settings, output: Path, command: str) -> None:
    """Measure, write the result, its plot and the documents for cards, and print its tables."""
    import matplotlib.figure  # noqa: F401  # plots come last: better missed before hours of measuring
    import transformers

    from ..results import print_blocks, without_folders, write_images, write_result

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    with console.status("loading") as status:
        result = benchmark.measure(settings, lambda share, doing: status.update(f"{share:.0%}: {doing}"))
    name = result["kind"].removeprefix("bench ")
    if isinstance(settings, ModelSettings):
        name += f"_{result['model']['type']}"
    blocks = benchmark.report(result, name)
    files = [output / f"{name}.json"]
    write_result(without_folders({**result, "command": command}), files[0])
    files += write_images(blocks, output)
    if isinstance(settings, ModelSettings):
        for attention, document in benchmark.speed_documents(result).items():
            files.append(output / f"{name.replace('model', 'speed', 1)}_{attention.replace(' ', '_')}.json")
            write_result(document, files[-1])
    print_blocks(blocks, console)
    console.print(f"Written: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)


_add("ops", OpsSettings, "Time of one attention layer by length: mechanisms against softmax.")
_add("model", ModelSettings, "Time, throughput and memory of whole models by length: inference and training.")
_add("decode", DecodeSettings, "Time and memory of generating one token, by length of context.")
