"""Ctrl-C ends a script with one line instead of a traceback.

Scripts import this first, so that it holds while everything else is loading.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # exit code, as shells have it


def say(interrupt: BaseException, hint: str = "") -> None:
    """Once a machine. What to do next is in the exception, if it was known where it came from."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        start = "\n" if sys.stderr.isatty() else ""  # a terminal shows ^C
        print(f"{start}{Path(sys.argv[0]).name}: Interrupted. {str(interrupt) or hint}".rstrip(), file=sys.stderr)


@contextmanager
def one_line_if_interrupted(hint: str = "") -> Iterator[None]:
    """For typer, which would end without a word."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        say(interrupt, hint)
        sys.exit(INTERRUPTED)


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say(error)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
