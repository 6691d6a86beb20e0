"""The part on transformers' own tests: how many pass with every model patched, and why the others fail."""

from collections import Counter
from typing import Any

from hf_rfattn.results import Block, Paragraph, Table

from .pages import Documents, Page, made_by

RESULT = "upstream.json"


def whole(documents: Documents, page: Page) -> list[Block]:
    """Tests that pass by model and mechanism, and those that fail by reason."""
    if RESULT not in documents:
        return [Paragraph("Nothing has been tested yet.")]
    document = documents[RESULT]
    passed: Counter[tuple[str, str]] = Counter()
    counted: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for row in document["rows"]:
        for model in (row["model"], "all"):
            passed[model, row["attention"]] += row["passed"]
            counted[model, row["attention"]] += row["counted"]
        failed.update((why, row["attention"]) for why in row["failed"].values())
    attentions = list(dict.fromkeys(row["attention"] for row in document["rows"]))
    models = [*dict.fromkeys(row["model"] for row in document["rows"]), "all"]
    reasons = dict.fromkeys(why for (why, _), _ in failed.most_common())
    tests = [[model, *(f"{passed[model, a]:,} of {counted[model, a]:,}" for a in attentions)] for model in models]
    why_not = [[why, *(str(failed[why, a]) for a in attentions)] for why in reasons]
    return [
        Paragraph(f"{made_by(document)} with {_tested(document)}:"),
        Table("", ["tests that pass", *attentions], tests, aligned=False),
        Table("", ["tests that fail", *attentions], why_not, aligned=False),
    ]


def _tested(document: dict[str, Any]) -> str:
    versions, checkout = document["versions"], document["checkout"]
    commit = f"tests of commit {checkout['commit'][:10]}" if checkout["commit"] else "tests outside git"
    note = f" ({checkout['note']})" if checkout["note"] else ""
    return f"transformers {versions['transformers']}, torch {versions['torch']}, {commit}{note}"
