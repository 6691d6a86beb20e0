"""Reports as lists of blocks, and their output as Markdown, as an HTML page or in the terminal."""

import base64
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from .documents import rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

DASH = "–"  # in a cell: not measured
PNG: dict[str, Any] = {"dpi": 150, "metadata": {"Software": None}}


@dataclass(frozen=True)
class Table:
    """A table. Columns with numbers are right-aligned, unless `aligned` is False."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    aligned: bool = True

    @property
    def has_numbers(self) -> list[bool]:
        """For each column, whether a cell starts with a number or is the dash of a missing one."""
        return [
            any(re.match(rf"[+\-−±≥≤]?\s*\d|{DASH}$", row[i]) for row in self.rows) for i in range(len(self.headings))
        ]


@dataclass(frozen=True)
class Image:
    """A plot. `name`: of the PNG file. `what`: description. `draw`: returns the figure."""

    name: str
    what: str
    draw: "Callable[[], Figure]"


Block = str | Table | Image  # text is Markdown


def as_markdown(blocks: Iterable[Block], image: Callable[[str], str] = str) -> str:
    """Render blocks as Markdown. `image` maps the name of a plot to its path.

    >>> print(as_markdown([Table("", ["attention", "ms"], [["favor+", "1.5"]])]), end="")
    | attention | ms |
    | --- | ---: |
    | favor+ | 1.5 |
    """
    return "\n\n".join(_markdown(block, image) for block in blocks) + "\n"


def _markdown(block: Block, image: Callable[[str], str]) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Image):
        return f"![{block.what}]({image(block.name)})"
    rule = ["---:" if block.aligned and numbers else "---" for numbers in block.has_numbers]
    escaped = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in [block.headings, *block.rows]]
    lines = [escaped[0], rule, *escaped[1:]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{block.title}**\n\n{table}" if block.title else table


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """Render blocks as one self-contained HTML page with embedded plots."""
    from markdown_it import MarkdownIt  # installed with rich

    body = MarkdownIt("js-default").render(as_markdown(blocks))
    for block in blocks:
        if isinstance(block, Image):
            stream = io.BytesIO()
            block.draw().savefig(stream, format="png", **PNG)
            data = base64.b64encode(stream.getvalue()).decode()
            body = body.replace(f'src="{block.name}"', f'src="data:image/png;base64,{data}"')
    page = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(title=html.escape(title), body=body)


def print_blocks(blocks: Iterable[Block], console: "Console") -> None:
    """Print blocks to the terminal, without images."""
    from rich.markdown import Markdown
    from rich.table import Table as RichTable

    for block in blocks:
        if isinstance(block, Table):
            table = RichTable(title=block.title or None, title_justify="left")
            for heading, numbers in zip(block.headings, block.has_numbers, strict=True):
                table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
            for row in block.rows:
                table.add_row(*row)
            console.print(table)
        elif not isinstance(block, Image):
            console.print(Markdown(_markdown(block, str)))


def write_images(blocks: Iterable[Block], folder: Path) -> list[Path]:
    """Write the plots of a report as PNG and return their paths. The same data give the same files."""
    written = []
    for block in blocks:
        if isinstance(block, Image):
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / block.name)
            block.draw().savefig(written[-1], **PNG)
    return written


def number(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, without exponents.

    >>> number(0.56999), number(1234567.0), number(3)
    ('0.57', '1,235,000', '3')
    """
    value = rounded(value, digits)
    return f"{int(value):,}" if value == int(value) else f"{value:,.12f}".rstrip("0")


def times(value: float | None) -> str:
    """
    >>> times(1.234), times(12.34), times(None)
    ('1.23 ×', '12.3 ×', '–')
    """
    return DASH if value is None else f"{value:.2f} ×" if value < 10 else f"{value:.1f} ×"


def si(count: float) -> str:
    """
    >>> si(12_345_678)
    '12.35 M'
    """
    return _scaled(count, 1000, ("", " k", " M", " G", " T", " P", " E"))


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(3 * 2**20)
    '3 MiB'
    """
    return _scaled(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.4g}{units[power]}"


def measured_crossover(lengths: Sequence[int], speed_over_softmax: Sequence[float]) -> tuple[int | None, int | None]:
    """Return the shortest measured length from which a mechanism stays faster than softmax, and the break-even length,
    interpolated on log-log axes.

    Both are None if it is slower at the longest length; the second is also None if it is faster at the shortest.

    >>> measured_crossover([128, 256, 512, 1024], [0.25, 0.5, 2.0, 4.0])
    (512, 362)
    >>> measured_crossover([128, 256, 512], [1.5, 0.9, 0.95])
    (None, None)
    """
    rows = sorted(zip(lengths, speed_over_softmax, strict=True))
    faster = len(rows)  # rows from this index are faster
    while faster and rows[faster - 1][1] > 1:
        faster -= 1
    if faster == len(rows):
        return None, None
    length, speed = rows[faster]
    if not faster:
        return length, None
    before, slower = rows[faster - 1]
    return length, round(before * (length / before) ** (math.log(1 / slower) / math.log(speed / slower)))


def crossover_text(lengths: Sequence[int], speed_over_softmax: Sequence[float]) -> str:
    """Format the result of `measured_crossover`.

    >>> crossover_text([256, 512], [0.5, 2.0]), crossover_text([128, 1024], [0.5, 0.9])
    ('512 (362)', 'not up to 1,024')
    """
    length, interpolated = measured_crossover(lengths, speed_over_softmax)
    if length is None:
        return f"not up to {max(lengths):,}"
    return f"{length:,}" + (f" ({interpolated:,})" if interpolated else "")
