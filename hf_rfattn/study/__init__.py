"""Studies: experiments on the mechanisms that run in under a minute and write plots, CSV and one JSON document.

Run `hf-rfattn study NAME` on the command line, or `run` from Python.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Study

STUDIES = {  # module and class; imported on demand, since matplotlib takes a while to import
    "gram": ("gram", "GramStudy"),
    "mse": ("mse", "MseStudy"),
    "heads": ("heads", "HeadsStudy"),
    "rank": ("rank", "RankStudy"),
    "mrf": ("markov_fields", "MrfStudy"),
}


def study_class(name: str) -> "type[Study]":
    """Return the class of a study. Its fields are the settings, with the defaults of a quick run.

    >>> study_class("gram").__name__
    'GramStudy'
    """
    if name not in STUDIES:
        raise ValueError(f"Unknown study {name!r}; choose one of {', '.join(STUDIES)}.")
    module, attribute = STUDIES[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def run(name: str, output: str | Path | None = None, *, full: bool = False, **settings: Any) -> dict[str, Any]:
    """Run a study and return its result document. `output`: folder to write its files to.

    `full`: use the settings of the full run instead of the quick one. `settings`: override these.

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
