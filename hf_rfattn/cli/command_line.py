"""Shared by all commands: error messages, progress bars, parsing of lists, and the command line for result files."""

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from ..results.messages import script

Choice = TypeVar("Choice")


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print warnings for users as one line, and ignore other categories."""
    if issubclass(category, UserWarning):
        typer.echo(f"hf-rfattn: Warning: {message}", err=True)


def example_of(words: str) -> str:
    """Return an example for the end of a help text, in which the first character preserves line breaks."""
    return f"\b\nExample:\n  hf-rfattn {words}"


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """Print user errors, Ctrl-C and warnings as one line each."""
    with script("Run the same command to start again.", name="hf-rfattn"), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Parse positive integers separated by commas. Returns them sorted, without duplicates.

    >>> parse_numbers("--lengths", "512, 128,512", "128,512")
    [128, 512]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r} must be positive integers separated by commas, such as {example}.")
    return sorted({int(part) for part in parts})


def parse_choices(option: str, text: str, choices: Mapping[str, Choice]) -> tuple[Choice, ...]:
    """Parse names separated by commas. Returns their values in the order of `choices`, without duplicates.

    >>> parse_choices("--passes", "training,forward", {"forward": 1, "training": 2})
    (1, 2)
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in choices:
            raise ValueError(f"{option}: unknown value {word!r}; choose from {', '.join(choices)}.")
    return tuple(value for name, value in choices.items() if name in words)


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if it is a terminal. Yields a function of the current step and the share done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)

        def show(doing: str, share: float | None = None) -> None:
            bar.update(task, description=doing, completed=share, total=None if share is None else 1.0)

        yield show


def typed(context: typer.Context) -> str:
    """Return the command line without its output options, to record in result files how to reproduce them."""
    words, kept = iter(context.find_root().obj), ["hf-rfattn"]
    for word in words:
        if word in ("-o", "--output"):
            next(words)
        elif word != "--json" and not word.startswith("--output="):
            kept.append(word)
    return shlex.join(kept)
