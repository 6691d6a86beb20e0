"""What commands share: errors and Ctrl-C as one line, progress, numbers and choices, the command as it was typed."""

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import typer

from ..results.messages import script

Choice = TypeVar("Choice")


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Without the line of code; warnings for developers are left out."""
    if issubclass(category, UserWarning):
        typer.echo(f"hf-rfattn: Warning: {message}", err=True)


def example_of(words: str) -> str:
    """The end of a command's help; the first character keeps the line breaks."""
    return f"\b\nExample:\n  hf-rfattn {words}"


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """User errors, Ctrl-C and warnings become one line each."""
    with script(name="hf-rfattn"), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Positive whole numbers between commas, sorted, each once.

    >>> parse_numbers("--lengths", "512, 128,512", "128,512")
    [128, 512]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers such as {example}.")
    return sorted({int(part) for part in parts})


def parse_choices(option: str, text: str, choices: Mapping[str, Choice]) -> tuple[Choice, ...]:
    """What the words between commas stand for, each once, in the order of the choices.

    >>> parse_choices("--passes", "training,forward", {"forward": 1, "training": 2})
    (1, 2)
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in choices:
            raise ValueError(f"{option} {word!r} is not possible; choose from {', '.join(choices)}.")
    return tuple(value for name, value in choices.items() if name in words)


@contextmanager
def progress_bar(doing: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr, if that is a terminal. Call it with what is being done and, if known, the share that is done."""
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
    """The command as it was typed, without the options for its output: it reproduces a result."""
    words, kept = iter(context.find_root().obj), ["hf-rfattn"]
    for word in words:
        if word in ("-o", "--output"):
            next(words)
        elif word != "--json" and not word.startswith("--output="):
            kept.append(word)
    return shlex.join(kept)
