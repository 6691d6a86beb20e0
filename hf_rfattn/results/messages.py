"""Errors that users can do something about, as one line on the terminal instead of a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..install import install_command

WRONG, INTERRUPTED = 2, 130  # exit codes; the second is that of shells after Ctrl-C
TRACEBACK = "HF_RFATTN_TRACEBACK"  # an environment variable: errors are then shown in full
USER_ERRORS = (ValueError, NotImplementedError, OSError, ImportError, FloatingPointError)
# Packages that not everybody needs, and the extra that each comes with.
EXTRAS = {"matplotlib": "plots", "rich": "bench", "accelerate": "recipes", "datasets": "recipes"}


def say(text: str, name: str | None = None) -> None:
    """Print a line to stderr, once per machine, after the name of the command, by default that of the script."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name or Path(sys.argv[0]).name}: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def script(hint: str = "", name: str | None = None) -> Iterator[None]:
    """User errors become one line and exit code 2; Ctrl-C one line, with its own message or the hint, and 130."""
    try:
        yield
    except USER_ERRORS as error:
        if os.environ.get(TRACEBACK):
            raise
        message = str(error).strip().partition("\n\n")[0] or type(error).__name__
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS:
            message = f"This needs the package {package}; run {install_command(EXTRAS[package])}."
        say(message, name)
        sys.exit(WRONG)
    except KeyboardInterrupt as interrupt:
        say(f"Interrupted. {str(interrupt) or hint}", name)
        sys.exit(INTERRUPTED)
