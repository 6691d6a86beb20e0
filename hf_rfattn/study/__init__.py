"""Studies: experiments on the mechanisms that run in under a minute and write plots, CSV and one JSON document.

Run `hf-rfattn study NAME` on the command line, or `run` from Python.
"""

import csv
import importlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..results.documents import name_of, new_result, rounded, write_result
from ..results.report import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDIES = {  # module and class; imported on demand, since matplotlib takes a while to import
    "gram": ("gram", "GramStudy"),
    "mse": ("mse", "MseStudy"),
    "heads": ("heads", "HeadsStudy"),
    "rank": ("rank", "RankStudy"),
    "mrf": ("markov_fields", "MrfStudy"),
}
Advance = Callable[[str], Any]
Result = dict[str, Any]
AnyStudy = TypeVar("AnyStudy", bound="Study")


class Study(ABC):
    """A frozen dataclass with the settings of one experiment. The defaults are those of a quick run."""

    name: ClassVar[str]
    full_settings: ClassVar[Mapping[str, Any]]  # settings that --full changes
    seed: int

    @classmethod
    def make(cls: type[AnyStudy], *, full: bool = False, **settings: Any) -> AnyStudy:
        """Create the quick or the full study, with some settings changed."""
        from ..mechanisms.config import did_you_mean

        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(f"The study {cls.name!r} has no setting {name!r}{hint}; known: {', '.join(known)}.")
        return cls(**{**(cls.full_settings if full else {}), **settings})

    @abstractmethod
    def measure(self, advance: Advance) -> Result:
        """Return "rows", one flat dict per measurement, and other data for plots. Calls `advance` before each step."""

    @staticmethod
    @abstractmethod
    def table(result: Result) -> Table:
        """Table of the main numbers of a result document."""

    @staticmethod
    @abstractmethod
    def figures(result: Result) -> "dict[str, Figure]":
        """Plots of a result document, by file name."""

    def run(self, advance: Advance = lambda doing: None) -> Result:
        """Return the result document."""
        started = time.perf_counter()
        shared = new_result(f"study {self.name}", seed=self.seed, packages=["matplotlib"])
        settings = asdict(self)  # type: ignore[call-overload]
        settings |= {name: name_of(settings[name]) for name in ("model", "text_file") if settings.get(name)}
        result = {**shared, "settings": settings, **self.measure(advance)}
        return result | {"wall_time_seconds": round(time.perf_counter() - started, 1)}

    def write(self, result: Result, output: Path) -> list[Path]:
        """Write NAME.json, NAME.csv and the plots as PNG, and return their paths."""
        written = [output / f"{self.name}.json", output / f"{self.name}.csv"]
        write_result(result, written[0])
        with written[1].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(result["rows"][0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(result["rows"])
        for name, figure in self.figures(result).items():
            written.append(output / f"{name}.png")
            figure.savefig(written[-1], dpi=110)
        return written


def study_class(name: str) -> type[Study]:
    """Return the class of a study. Its fields are the settings, with the defaults of a quick run.

    >>> study_class("gram").__name__
    'GramStudy'
    """
    if name not in STUDIES:
        raise ValueError(f"Unknown study {name!r}; choose one of {', '.join(STUDIES)}.")
    module, attribute = STUDIES[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def run(name: str, output: str | Path | None = None, *, full: bool = False, **settings: Any) -> Result:
    """Run a study and return its result document. `output`: folder to write its files to.

    `full`: use the settings of the full run instead of the quick one. `settings`: override these.

    >>> result = run("gram", features=(8, 32), draws=2, length=16)
    >>> sorted({row["kernel"] for row in result["rows"]})
    ['cauchy', 'gaussian', 'laplace']
    """
    study = study_class(name).make(full=full, **settings)
    result = study.run()
    if output is not None:
        study.write(result, Path(output))
    return result


def rows_with(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Select the rows whose columns have these values.

    >>> rows_with([{"M": 8, "error": 0.5}, {"M": 16, "error": 0.3}], M=16)
    [{'M': 16, 'error': 0.3}]
    """
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def mean_columns(name: str, samples: Sequence[float]) -> dict[str, float]:
    """Mean of samples as column `name`, and mean ± standard error as columns low and high.

    >>> mean_columns("error", [1.0, 3.0])
    {'error': 2.0, 'low': 1.0, 'high': 3.0}
    """
    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / len(samples) ** 0.5 if len(samples) > 1 else 0.0
    return {name: rounded(mean), "low": rounded(mean - error), "high": rounded(mean + error)}
