"""Base class of studies: settings, a measurement that returns a document, and a table and figures of the document."""

import csv
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from matplotlib.figure import Figure

from ..mechanisms.config import did_you_mean
from ..results import Table, name_of, new_result, rounded, write_result

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
    def figures(result: Result) -> dict[str, Figure]:
        """Plots of a result document, by file name."""


def run_study(study: Study, advance: Advance = lambda doing: None) -> Result:
    """Run a study and return its result document."""
    started = time.perf_counter()
    shared = new_result(f"study {study.name}", seed=study.seed, packages=["matplotlib"])
    settings = asdict(study)  # type: ignore[call-overload]
    settings |= {name: name_of(settings[name]) for name in ("model", "text_file") if settings.get(name)}
    result = {**shared, "settings": settings, **study.measure(advance)}
    return result | {"wall_time_seconds": round(time.perf_counter() - started, 1)}


def write_study(study: Study, result: Result, output: Path) -> list[Path]:
    """Write NAME.json, NAME.csv and the plots as PNG, and return their paths."""
    written = [output / f"{study.name}.json", output / f"{study.name}.csv"]
    write_result(result, written[0])
    rows = result["rows"]
    with written[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for name, figure in study.figures(result).items():
        written.append(output / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
    return written


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
