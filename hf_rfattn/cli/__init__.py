"""The command line, `hf-rfattn`: one file per group of commands. Commands import what they need when they run."""

import json
import shutil
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from . import bench, hub
from .command_line import example_of
from .convert_model import convert
from .doctor import doctor
from .inspect_model import inspect_model
from .patch_model import patch, unpatch
from .study import study

if TYPE_CHECKING:
    from ..mechanisms.config import Option


class _Commands(TyperGroup):
    """The top level. Its help lists the commands by purpose; `obj` is the command line as it was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(70)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(
    name="hf-rfattn",
    cls=_Commands,
    help="Replace the softmax attention of pretrained models. See also: COMMAND --help",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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


def list_mechanisms(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List attention mechanisms and their options."""
    from ..mechanisms import describe_options, mechanism_names, resolve_config
    from ..mechanisms.config import option_value
    from ..mechanisms.registry import mechanism_aliases, mechanism_title

    names = mechanism_names()
    configs = {name: type(resolve_config(name)) for name in names}
    aliases: dict[str, dict[str, Any]] = {name: {} for name in names}
    for alias, (target, options) in mechanism_aliases().items():
        aliases[target][alias] = options
    if as_json:
        listed = {
            name: {
                "description": mechanism_title(config),
                "aliases": aliases[name],
                "options": [vars(option) for option in describe_options(config)],
            }
            for name, config in configs.items()
        }
        typer.echo(json.dumps(listed, indent=2))
        return
    for name, config in configs.items():
        typer.echo(f"{name}  {mechanism_title(config)}")
        also = []
        for alias, options in aliases[name].items():
            preset = ", ".join(f"{key}={option_value(value)}" for key, value in options.items())
            also.append(f"{alias} ({preset})" if preset else alias)
        if also:
            typer.echo(f"  also called: {', '.join(also)}")
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


def _add(command: Callable[..., None], panel: str, example: str, name: str | None = None) -> None:
    app.command(name, rich_help_panel=panel, epilog=example_of(example))(command)


CHANGE, MEASURE, SHARE = "Change a model", "Explore and measure", "Share a model"
_add(convert, CHANGE, "convert bert-base-uncased hedgehog --data texts.txt -o out")
_add(patch, CHANGE, "patch bert-base-uncased multipole exact_keys=256 -o out")
_add(unpatch, CHANGE, "unpatch out -o original")
_add(list_mechanisms, MEASURE, "list", "list")
_add(inspect_model, MEASURE, "inspect bert-base-uncased --attention multipole exact_keys=256", "inspect")
app.add_typer(bench.app, rich_help_panel=MEASURE)
_add(study, MEASURE, "study heads --model bert-base-uncased")
_add(doctor, MEASURE, "doctor")
_add(hub.card, SHARE, "card out --base-model google-bert/bert-base-uncased")
_add(hub.publish, SHARE, "publish out --repo me/bert-multipole --dry-run")
