"""The experiments behind the mechanisms: each runs in under a minute, and writes plots, CSV and one JSON document.

`hf-rfattn study NAME` on the command line, `run` from Python.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Study

STUDIES = {  # module and class; imported when they run, since plots take a while to import
    "gram": ("gram", "GramStudy"),
    "mse": ("mse", "MseStudy"),
    "heads": ("heads", "HeadsStudy"),
    "rank": ("rank", "RankStudy"),
    "mrf": ("markov_fields", "MrfStudy"),
}


def study_class(name: str) -> "type[Study]":
    """The study of that name; its fields are its settings, its defaults those of a quick run.

    >>> study_class("gram").__name__
    'GramStudy'
    """
    if name not in STUDIES:
        raise ValueError(f"Unknown study {name!r}; choose one of {', '.join(STUDIES)}.")
    module, attribute = STUDIES[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def run(name: str, output: str | Path | None = None, *, full: bool = False, **settings: Any) -> dict[str, Any]:
    """Run a study, write its files to the folder `output` if one is given, and return its result document.

    `settings` replace those of the quick run, or of the `full` one.

    >>> result = run("gram", features=(8, 32), draws=2, length=16)
    >>> sorted({row["kernel"] for row in result["rows"]})
    ['cauchy', 'gaussian', 'laplace']
    """
    from .base import run_study, write_study

    study = study_class(name).make(full=full, **settings)
    result = run_study(study)
    if output is not None:
        write_study(study, result, Path(output))
    return result
