"""What all parts share: tables, ratios, and where files lie for the reader of a page."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rfattn.results import machine

PIPE = r"\|"  # in a cell
Documents = dict[str, dict[str, Any]]  # result files by their path below recipes/results


@dataclass(frozen=True)
class Page:
    """`results`: where the results folder lies, seen from the page."""

    results: str

    def address(self, name: str) -> str:
        return f"{self.results}{name}"

    def link(self, name: str) -> str:
        return f"[{name}]({self.address(name)})"

    def image(self, name: str, what: str) -> str:
        """The plot beside a result file."""
        return f"![{what}]({self.address(str(Path(name).with_suffix('.png')))})"


def of_kind(documents: Documents, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, document) for name, document in documents.items() if document["kind"] == kind]


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', PIPE) for cell in line)} |" for line in lines)


def times(value: float | None) -> str:
    """
    >>> times(1.234), times(12.34), times(None)
    ('1.23 ×', '12.3 ×', '–')
    """
    return "–" if value is None else f"{value:.2f} ×" if value < 10 else f"{value:.1f} ×"


def measured_on(document: dict[str, Any]) -> str:
    return f"{machine(document['hardware'])}, torch {document['versions']['torch']}"


def made_by(document: dict[str, Any]) -> str:
    return f"`{document.get('command') or 'hf-rfattn ' + document['kind']}`"
