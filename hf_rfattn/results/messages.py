"""User errors and Ctrl-C, printed as one line instead of a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..install import install_command

WRONG, INTERRUPTED = 2, 130  # exit codes; shells use 130 after Ctrl-C
TRACEBACK = "HF_RFATTN_TRACEBACK"  # environment variable; if set, errors are shown with their traceback
USER_ERRORS = (ValueError, NotImplementedError, OSError, ImportError, FloatingPointError)
DAMAGED = "SafetensorError"  # by name: the environment that builds the docs has no safetensors
# Optional packages, and the extra that installs each.
EXTRAS = {"matplotlib": "plots", "rich": "bench"}
EXTRAS |= dict.fromkeys(("accelerate", "datasets", "scipy", "sentence_transformers"), "recipes")


def say(text: str, name: str | None = None) -> None:
    """Print a line to stderr after the name of the command (default: of the script), in one process per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{name or Path(sys.argv[0]).name}: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def script(hint: str = "", name: str | None = None) -> Iterator[None]:
    """Print user errors as one line and exit with 2; print Ctrl-C with its message, or `hint`, and exit with 130."""
    try:
        yield
    except Exception as error:
        named = type(error).__name__
        if os.environ.get(TRACEBACK) or not (isinstance(error, USER_ERRORS) or named == DAMAGED):
            raise
        message = str(error).strip().partition("\n\n")[0] or named
        if isinstance(error, FileNotFoundError) and error.filename:
            message = f"There is no file or folder {str(error.filename)!r}."
        package = error.name if isinstance(error, ModuleNotFoundError) else None
        if package and "." not in package:  # otherwise a part of an installed package is missing
            install = install_command(EXTRAS[package]) if package in EXTRAS else f"`pip install {package}`"
            message = f"This needs the package {package}; run {install}."
        if named == DAMAGED and "deserializ" in message:
            message = f"A weights file of the model is damaged; download or copy the model again. ({message})"
        say(message, name)
        sys.exit(WRONG)
    except KeyboardInterrupt as interrupt:
        say(f"Interrupted. {str(interrupt) or hint}", name)
        sys.exit(INTERRUPTED)
