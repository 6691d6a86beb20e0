"""A document as a list of blocks, and the forms it can be written in: Markdown, a page of HTML, the terminal."""

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from rich.table import Table as RichTable

WORDS = ("options", "", "aim", "reached")  # headings of columns that hold no numbers
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { border-bottom: 2px solid #888; }
th:first-child, td:first-child, .text { text-align: left; } td.text { min-width: 9rem; }
tr.softmax { background: #f0f0f0; font-weight: 600; } tr.control { color: #777; font-style: italic; }
img { max-width: 100%; height: auto; } .scroll { overflow-x: auto; } p { max-width: 52rem; }
@media print { .scroll { overflow: visible; } }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """`kinds` of rows: "softmax", "control" or ""."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: Sequence[str]


@dataclass(frozen=True)
class Image:
    name: str
    what: str
    figure: Figure


Block = Heading | Paragraph | Table | Image


def as_markdown(blocks: Iterable[Block], image: Callable[[str], str] = str) -> str:
    """`image`: from the name of a plot to where it lies."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Paragraph):
            parts.append(block.text)
        elif isinstance(block, Image):
            parts.append(f"![{block.what}]({image(block.name)})")
        else:
            rule = ["---" if heading in ("attention", *WORDS) else "---:" for heading in block.headings]
            lines = [block.headings, rule, *block.rows]
            table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
            parts.append(f"**{block.title}**\n\n{table}" if block.title else table)
    return "\n\n".join(parts) + "\n"


def as_html(title: str, blocks: Iterable[Block]) -> str:
    """One page; plots stand in it as data."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"<h{block.level}>{html.escape(block.text)}</h{block.level}>")
        elif isinstance(block, Paragraph):
            parts.append(f"<p>{_code(html.escape(block.text))}</p>")
        elif isinstance(block, Image):
            stream = io.BytesIO()
            block.figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})
            data = base64.b64encode(stream.getvalue()).decode()
            width = round(100 * block.figure.get_figwidth())
            parts.append(f'<img alt="{html.escape(block.what)}" width="{width}" src="data:image/png;base64,{data}">')
        else:
            parts.append(_html_table(block))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _html_table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        text = [' class="text"' if heading in WORDS else "" for heading in table.headings]
        return "".join(f"<{tag}{is_text}>{_cell(c)}</{tag}>" for is_text, c in zip(text, cells, strict=True))

    rows = [
        f'<tr class="{name}">{line("td", row)}</tr>' if name else f"<tr>{line('td', row)}</tr>"
        for name, row in zip(table.kinds, table.rows, strict=True)
    ]
    title = f"<h3>{html.escape(table.title)}</h3>\n" if table.title else ""
    head = f"<thead><tr>{line('th', table.headings)}</tr></thead>"
    return f'{title}<div class="scroll"><table>{head}\n<tbody>' + "\n".join(rows) + "</tbody></table></div>"


def _cell(text: str) -> str:
    """Lines break between words and at arrows, but not within a number and its unit.

    >>> _cell("8.4 ± 0.2 → 9.1 %, a control")
    '8.4&nbsp;±&nbsp;0.2 → 9.1&nbsp;%, a control'
    """
    return re.sub(r"(?<=\d) (?=[%×±\w])|(?<=±) ", "&nbsp;", html.escape(text))


def _code(text: str) -> str:
    """`words` between back-ticks.

    >>> _code("`a` b")
    '<code>a</code> b'
    """
    parts = text.split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def as_rich(table: Table, title: str) -> RichTable:
    made = RichTable(title=title)
    for heading in table.headings:
        made.add_column(heading, justify="left" if heading in ("attention", *WORDS) else "right")
    for name, row in zip(table.kinds, table.rows, strict=True):
        made.add_row(*row, style={"softmax": "bold", "control": "dim"}.get(name))
    return made
