"""The command line, `hf-rfattn`: one file for each group of commands. What a command needs is imported when it runs."""

import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from . import bench, hub
from .doctor import doctor
from .inspect_model import inspect_model
from .patch_model import patch, unpatch
from .study import study

if TYPE_CHECKING:
    from ..mechanisms.config import Option

app = typer.Typer(
    name="hf-rfattn",
    help="Linear-time attention for pretrained Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-rfattn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_mechanisms() -> None:
    """Every mechanism, its aliases, and its options with their defaults."""
    from ..mechanisms import describe_options, mechanism_names, resolve_config
    from ..mechanisms.config import option_value
    from ..mechanisms.registry import mechanism_aliases, mechanism_title

    for name in mechanism_names():
        config = type(resolve_config(name))
        typer.echo(f"{name}  {mechanism_title(config)}")
        aliases = []
        for alias, (target, options) in mechanism_aliases().items():
            preset = ", ".join(f"{key}={option_value(value)}" for key, value in options.items())
            if target == name:
                aliases.append(f"{alias} ({preset})" if preset else alias)
        if aliases:
            typer.echo(f"  also called: {', '.join(aliases)}")
        _print_options(describe_options(config))
        typer.echo()


def _print_options(options: "list[Option]") -> None:
    if not options:
        return
    width = shutil.get_terminal_size().columns
    names, defaults = (max(len(getattr(option, part)) for option in options) for part in ("name", "default"))
    for option in options:
        start = f"  {option.name:<{names}}  = {option.default:<{defaults}}  "
        choices = f"({' | '.join(option.choices)}) " if option.choices else ""
        text = textwrap.wrap(choices + option.help, max(width - len(start), 30)) or [""]
        typer.echo(f"\n{' ' * len(start)}".join([start + text[0], *text[1:]]).rstrip())


app.command("inspect")(inspect_model)
app.command()(patch)
app.command()(unpatch)
app.add_typer(bench.app)
app.command()(study)
app.command()(hub.card)
app.command()(hub.publish)
app.command()(doctor)
