"""The one place where exceptions become messages: one line on the terminal instead of a traceback.

Scripts import this first, so that it holds for Ctrl-C while everything else is loading.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRONG, INTERRUPTED = 2, 130  # exit codes
TRACEBACK = "HF_RFATTN_TRACEBACK"  # an environment variable: errors are then shown in full
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
        from hf_rfattn.results.folders import disk_is_full

        if disk_is_full(error, output or Path()):
            say(f"The disk of {output or 'the output'} is full. Make room, then run again with --resume.")
        elif isinstance(error, USER_ERRORS) and not os.environ.get(TRACEBACK):
            say(str(error) if _is_ours(error) else f"{error} (Set {TRACEBACK}=1 to see where this comes from.)")
        else:
            raise
        sys.exit(WRONG)


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in this package or its recipes, whose messages say what to do."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return True
    place = Path(traceback.tb_frame.f_code.co_filename)
    return Path(__file__).parents[1] in place.parents or "hf_rfattn" in place.parts


@contextmanager
def script(hint: str = "") -> Iterator[None]:
    """The same for scripts that typer runs, which would end after Ctrl-C without a word."""
    try:
        with errors_as_messages():
            yield
    except KeyboardInterrupt as interrupt:
        say_interrupted(interrupt, hint)
        sys.exit(INTERRUPTED)


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say_interrupted(error)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
