"""Mistakes of the user, missing packages and Ctrl-C as one message; numbers and choices from the command line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import typer

from ..install import install_command

Choice = TypeVar("Choice")
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it

# Packages that not everybody needs, and the extra that each comes with.
EXTRAS = {
    "matplotlib": "plots",
    "psutil": "bench",
    "rich": "bench",
    "accelerate": "recipes",
    "datasets": "recipes",
}


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """What the user got wrong becomes one message and exit code 2; Ctrl-C one message and 130."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        message, code = str(error), 2
        if package in EXTRAS:
            message = f"This needs the package {package}; run {install_command(EXTRAS[package])}."
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "Interrupted.", INTERRUPTED
    else:
        return
    paragraph = message.strip().partition("\n\n")[0]
    typer.echo(f"hf-rfattn: {' '.join(paragraph.split())}", err=True)
    raise typer.Exit(code)


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
