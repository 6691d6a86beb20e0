"""What all parts share: result files by name, and where files lie for the reader of a page."""

from dataclasses import dataclass
from typing import Any

from hf_rfattn.results import machine

Documents = dict[str, dict[str, Any]]  # result files by their path below recipes/results


@dataclass(frozen=True)
class Page:
    """`results`: where the results folder lies, seen from the page."""

    results: str

    def address(self, name: str) -> str:
        return f"{self.results}{name}"

    def link(self, name: str) -> str:
        return f"[{name}]({self.address(name)})"


def of_kind(documents: Documents, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, document) for name, document in documents.items() if document["kind"] == kind]


def measured_on(document: dict[str, Any]) -> str:
    return f"{machine(document['hardware'])}, torch {document['versions']['torch']}"


def made_by(document: dict[str, Any]) -> str:
    return f"`{document.get('command') or 'hf-rfattn ' + document['kind']}`"
