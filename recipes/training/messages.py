"""Scripts import this first, so that Ctrl-C prints one line instead of a traceback even during the other imports."""

import sys
from typing import Any

from hf_rfattn.results.messages import say, script

__all__ = ["script"]


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say("Interrupted.")
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
