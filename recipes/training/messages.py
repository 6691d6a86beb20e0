"""The one place where exceptions become messages: one line on the terminal instead of a traceback.

Scripts import this first, so that it also holds for Ctrl-C while everything else is loading.
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
    """Once per machine, with the name of the script."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def script(hint: str = "") -> Iterator[None]:
    """What the user can do something about becomes one line and exit code 2; Ctrl-C one line and 130."""
    try:
        yield
    except USER_ERRORS as error:
        if os.environ.get(TRACEBACK):
            raise
        say(str(error) or type(error).__name__)
        sys.exit(WRONG)
    except KeyboardInterrupt as interrupt:
        say(f"Interrupted. {str(interrupt) or hint}")
        sys.exit(INTERRUPTED)


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say("Interrupted.")
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
