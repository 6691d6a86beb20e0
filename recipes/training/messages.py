"""Scripts import this first, so that Ctrl-C and missing packages print one line even during the other imports."""

import os
import sys
from typing import Any

from hf_rfattn.results.messages import TRACEBACK, install_command, say, script

__all__ = ["script"]


def _hook(kind: Any, error: BaseException, traceback: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say("Interrupted.")
    elif issubclass(kind, ModuleNotFoundError) and not os.environ.get(TRACEBACK):
        say(f"{error}. Recipes need more packages than hf_rfattn itself; run {install_command('recipes')}.")
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _hook
