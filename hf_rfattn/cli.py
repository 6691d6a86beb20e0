"""The command line: `hf-rfattn list`, `inspect`, `patch`, `unpatch`, `bench`, `study`, `card` and `publish`.

torch and transformers are imported inside the commands, by what they call.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import __version__
from .bench.cli import app as bench
from .commands import (
    errors_without_traceback,
    load_config,
    model_class,
    new_folder,
    option_value,
    option_values,
    parse_attention,
)
from .hub.cli import add_commands as add_hub_commands
from .inspect_command import inspect_model
from .study.cli import app as study

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .mechanisms import MechanismConfig

app = typer.Typer(
    name="hf-rfattn",
    help="Linear-time attention for pretrained Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-rfattn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_mechanisms() -> None:
    """Every mechanism, its aliases, and its options with their defaults."""
    from .mechanisms import mechanism_names, resolve_config
    from .mechanisms.registry import mechanism_aliases

    console = Console()
    for name in mechanism_names():
        config = resolve_config(name)
        title, descriptions = _describe(type(config))
        console.print(f"[bold]{name}[/bold]  {title}", highlight=False)
        aliases = [
            alias + (f" ({option_values(options)})" if options else "")
            for alias, (target, options) in mechanism_aliases().items()
            if target == name
        ]
        if aliases:
            console.print(f"  also called: {', '.join(aliases)}", highlight=False, markup=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for option, (default, choices) in _options(config).items():
            table.add_row(f"  {option}", f"= {default}", " ".join(filter(None, [choices, descriptions.get(option)])))
        if table.row_count:
            console.print(table, markup=False)
        console.print()


def _describe(config: "type[MechanismConfig]") -> tuple[str, dict[str, str]]:
    """First line of the file that holds a mechanism, and what the docstring of its config says of each `option`: …"""
    import inspect
    import re

    module = inspect.getdoc(inspect.getmodule(config)) or ""
    text = " ".join((inspect.getdoc(config) or "").split())
    headings = list(re.finditer(r"((?:`\w+`(?:, | and )?)+): ", text))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    descriptions = {
        option: text[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=False)  # without headings there is one end too many
        for option in re.findall(r"`(\w+)`", heading[1])
    }
    return module.partition("\n")[0], descriptions


def _options(config: "MechanismConfig") -> dict[str, tuple[str, str]]:
    """Default and choices of each option."""
    import dataclasses
    import typing

    hints = typing.get_type_hints(type(config))
    found = {}
    for field in dataclasses.fields(config):
        literals = [hints[field.name], *typing.get_args(hints[field.name])]
        choices = [c for hint in literals if typing.get_origin(hint) is typing.Literal for c in typing.get_args(hint)]
        found[field.name] = (
            option_value(getattr(config, field.name)),
            f"({' | '.join(map(str, choices))})" if choices else "",
        )
    return found


app.command("inspect")(inspect_model)


Output = Annotated[Path, typer.Option("-o", "--output", help="The new folder; it must not exist, or be empty.")]


@app.command()
def patch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a model's name on the Hub.")],
    attention: Annotated[str, typer.Argument(help="A mechanism of `hf-rfattn list`.")],
    output: Output,
    options: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Options of the mechanism.")] = None,
    layers: Annotated[str | None, typer.Option(help="Which layers, such as 0-5,11; all by default.")] = None,
    cross_attention: Annotated[bool, typer.Option(help="Patch cross-attention too.")] = False,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
    max_length: Annotated[
        int | None, typer.Option(help="Extend learned positions to so many tokens, in the tokenizer too.")
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="How: interpolate stretches those there are (the default), tile repeats them.")
    ] = None,
) -> None:
    """Patch MODEL and save it with its tokenizer; `from_pretrained` of the folder gives it back patched."""

    def change(loaded: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None") -> None:
        from . import extend_positions, patch_model

        patch_model(loaded, config, layers=layers, cross_attention=cross_attention, seed=seed)
        if max_length is not None:
            extend_positions(loaded, max_length, method=positions or "interpolate", tokenizer=tokenizer)  # type: ignore[arg-type]

    with errors_without_traceback():
        if positions is not None and max_length is None:
            raise ValueError("--positions says how positions are extended; say with --max-length how far.")
        config = parse_attention(attention, options or [])
        _convert(model, output, change)
    typer.echo(f"{output}: {model} with {attention}. Load it after `import hf_rfattn`. It needs training.")


@app.command()
def unpatch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A patched folder, or its name on the Hub.")],
    output: Output,
) -> None:
    """Save a patched MODEL with softmax again, without its mechanisms."""

    def change(loaded: "PreTrainedModel", tokenizer: object) -> None:
        from . import unpatch_model
        from .mechanisms import Mechanism

        if not any(isinstance(module, Mechanism) for module in loaded.modules()):
            raise ValueError(f"{model} is not patched.")
        unpatch_model(loaded)

    with errors_without_traceback():
        _convert(model, output, change)
    typer.echo(f"{output}: {model} with softmax.")


def _convert(
    name: str, output: Path, change: "Callable[[PreTrainedModel, PreTrainedTokenizerBase | None], None]"
) -> None:
    """Load a model and its tokenizer, change them, and save them into a new folder."""
    with new_folder(output) as partial:
        _convert_into(name, partial, change)


def _convert_into(
    name: str, output: Path, change: "Callable[[PreTrainedModel, PreTrainedTokenizerBase | None], None]"
) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    loaded = model_class(load_config(name)).from_pretrained(name, trust_remote_code=False)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    change(loaded, tokenizer)
    loaded.save_pretrained(output)
    if tokenizer is None:
        typer.echo(f"{name} has no tokenizer that could be copied.", err=True)
    else:
        tokenizer.save_pretrained(output)


app.add_typer(bench)
app.add_typer(study)
add_hub_commands(app)
