"""What every study is: settings, a measurement that gives a document, and plots, tables and conclusions from it."""

import csv
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import matplotlib
from matplotlib.figure import Figure
from rich.table import Table

from ..mechanisms.config import did_you_mean
from ..results import name_of, new_result, write_result

Advance = Callable[[str], Any]
Result = dict[str, Any]
AnyStudy = TypeVar("AnyStudy", bound="Study")


class Study(ABC):
    """A frozen dataclass whose fields are the settings of one experiment, with the defaults of a quick run.

    `measure` gives data alone; `figures`, `tables` and `conclusions` are made from the document that holds them.
    """

    name: ClassVar[str]
    full_settings: ClassVar[Mapping[str, Any]]  # what --full changes
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

    @property
    @abstractmethod
    def steps(self) -> int:
        """How often `measure` will call `advance`."""

    @abstractmethod
    def measure(self, advance: Advance) -> Result:
        """The data: "rows", one flat dict a measurement, and whatever else plots need. Tells `advance` what it does."""

    @staticmethod
    @abstractmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Plots by name of file."""

    @staticmethod
    @abstractmethod
    def tables(result: Result) -> list[Table]:
        """Short tables for the terminal."""

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
        for name, figure in study.figures(result).items():
            for kind in ("svg", "png"):
                written.append(output / f"{name}.{kind}")
                metadata = {"Date": None} if kind == "svg" else None  # the same data gives the same file
                figure.savefig(written[-1], dpi=110, metadata=metadata)
    return written


def text_table(title: str, columns: list[str], rows: list[list[str]], left: int = 1) -> Table:
    """A table whose first `left` columns are words and the others numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*row)
    return table
