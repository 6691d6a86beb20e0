"""The one place where exceptions become messages: one line on the terminal instead of a traceback.

Scripts import this first, so that it holds for Ctrl-C while everything else is loading.
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRONG, INTERRUPTED = 2, 130  # exit codes
USER_ERRORS = (ValueError, NotImplementedError, OSError, ImportError, FloatingPointError)


def say(text: str) -> None:
    """Once a machine, with the name of the script."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {' '.join(text.split())}", file=sys.stderr)


def say_interrupted(interrupt: BaseException, hint: str = "") -> None:
    """What to do next is in the exception, if it was known where it came from."""
    if sys.stderr.isatty():
        print(file=sys.stderr)  # a terminal shows ^C
    say(f"Interrupted. {str(interrupt) or hint}")


@contextmanager
def errors_as_messages(output: Path | None = None) -> Iterator[None]:
    """What the user can do something about becomes one line and exit code 2."""
    try:
        yield
    except Exception as error:
        if disk_is_full(error, output or Path()):
            say(f"The disk of {output or 'the output'} is full. Make room, then run again with --resume.")
        elif isinstance(error, USER_ERRORS):
            say(str(error))
        else:
            raise
        sys.exit(WRONG)


@contextmanager
def script(hint: str = "") -> Iterator[None]:
    """The same for scripts that typer runs, which would end after Ctrl-C without a word."""
    try:
        with errors_as_messages():
            yield
    except KeyboardInterrupt as interrupt:
        say_interrupted(interrupt, hint)
        sys.exit(INTERRUPTED)


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether this is why writing to a folder failed; torch and safetensors each have an error of their own for it."""
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
        return True
    there = next(place for place in [folder.resolve(), *folder.resolve().parents] if place.exists())
    return shutil.disk_usage(there).free < 2**20


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say_interrupted(error)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
