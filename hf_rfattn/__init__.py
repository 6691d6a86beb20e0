"""Random-feature and fast-multipole attention for pretrained Hugging Face models.

Importing this package takes milliseconds: public names are imported when they are first used.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from .import_hook import follow_transformers

__version__ = "0.2.0"

_PUBLIC = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME = {name.name: node.module for node in _PUBLIC.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


follow_transformers()
