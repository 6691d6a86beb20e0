"""Scripts import this first: Ctrl-C is one line instead of a traceback, also while everything else is loading."""

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
