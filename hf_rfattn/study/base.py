"""What every study is: settings, a measurement that gives a document, and figures and conclusions from it."""

import csv
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import matplotlib
from matplotlib.figure import Figure

from ..mechanisms.config import did_you_mean
from ..results import name_of, new_result, write_result

Advance = Callable[[str], Any]
Result = dict[str, Any]
AnyStudy = TypeVar("AnyStudy", bound="Study")


class Study(ABC):
    """A frozen dataclass whose fields are the settings of one experiment, with the defaults of a quick run.

    `measure` gives data alone; `figures` and `conclusions` are made from the document that holds them.
    """

    name: ClassVar[str]
    full_settings: ClassVar[Mapping[str, Any]]  # what --full changes
    figures: ClassVar[Mapping[str, Callable[[Result], Figure]]]  # by name of file
    seed: int

    @classmethod
    def make(cls: type[AnyStudy], *, full: bool = False, **settings: Any) -> AnyStudy:
        """The quick or the full study, with some settings changed."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                raise ValueError(
                    f"The study {cls.name!r} has no setting {name!r}{did_you_mean(name, known)}; it has "
                    f"{', '.join(known)}."
                )
        return cls(**{**(cls.full_settings if full else {}), **settings})

    @abstractmethod
    def measure(self, advance: Advance) -> Result:
        """The data: "rows", one flat dict a measurement, and whatever else plots need. Tells `advance` what it does."""

    @staticmethod
    @abstractmethod
    def conclusions(result: Result) -> list[str]:
        """What the numbers say, one sentence each."""


def run_study(study: Study, output: Path | None, advance: Advance = lambda doing: None) -> Result:
    """Measure, conclude, and write NAME.json, NAME.csv and the plots as PNG and SVG."""
    started = time.perf_counter()
    shared = new_result(f"study {study.name}", seed=study.seed, packages=["matplotlib"])
    settings = dataclasses.asdict(study)  # type: ignore[call-overload]
    settings |= {name: name_of(settings[name]) for name in ("model", "text_file") if settings.get(name)}
    result = {**shared, "settings": settings, **study.measure(advance)}
    result["conclusions"] = study.conclusions(result)
    result["wall_time_seconds"] = round(time.perf_counter() - started, 1)
    if output is not None:
        write_study(study, result, output)
    return result


def write_study(study: Study | type[Study], result: Result, output: Path) -> list[Path]:
    """The files of a result; returns their paths."""
    written = [output / f"{study.name}.json", output / f"{study.name}.csv"]
    write_result(result, written[0])
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with written[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": study.name}):
        for name, draw in study.figures.items():
            figure = draw(result)
            for kind in ("svg", "png"):
                written.append(output / f"{name}.{kind}")
                metadata = {"Date": None} if kind == "svg" else None  # the same data gives the same file
                figure.savefig(written[-1], dpi=110, metadata=metadata)
    return written


def rows_with(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Those whose columns have these values.

    >>> rows_with([{"M": 8, "error": 0.5}, {"M": 16, "error": 0.3}], M=16)
    [{'M': 16, 'error': 0.3}]
    """
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]
