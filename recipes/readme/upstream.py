"""The part on transformers' own tests: how many pass with every model patched, and why the others do not."""

from collections import Counter

from .markdown import Documents, Page, made_by, table

RESULT = "upstream.json"


def whole(documents: Documents, page: Page) -> str:
    """Tests that pass, by model and mechanism, and the reasons of the others."""
    if RESULT not in documents:
        return "Nothing has been tested yet."
    document = documents[RESULT]
    rows = document["rows"]
    attentions = list(dict.fromkeys(row["attention"] for row in rows))

    def cells(model: str | None) -> list[str]:
        chosen = [[r for r in rows if r["attention"] == name and model in (None, r["model"])] for name in attentions]
        passed = [f"{_sum(each, 'passed'):,} of {_sum(each, 'counted'):,}" for each in chosen]
        return [f"{_sum(chosen[0], 'passed_unpatched'):,}", *passed]

    models = dict.fromkeys(row["model"] for row in rows)
    counts = [[model, *cells(model)] for model in models] + [["all", *cells(None)]]
    reasons = {
        name: Counter(why for r in rows if r["attention"] == name for why in r["failed"].values())
        for name in attentions
    }
    ordered = [why for why, _ in sum(reasons.values(), Counter()).most_common()]
    return "\n\n".join(
        [
            f"{made_by(document)} with {_tested(document)}.",
            table(["tests of", "pass unpatched", *(f"pass with {name}" for name in attentions)], counts),
            "The tests that fail, by reason:",
            table(
                ["reason", *attentions], [[why, *(str(reasons[name][why]) for name in attentions)] for why in ordered]
            ),
        ]
    )


def _sum(rows: list[dict], key: str) -> int:
    return sum(row[key] for row in rows)


def _tested(document: dict) -> str:
    versions, checkout = document["versions"], document["checkout"]
    packages = f"transformers {versions['transformers']}, torch {versions['torch']}"
    commit = f"tests of commit {checkout['commit'][:10]}" if checkout["commit"] else "tests of a folder without git"
    return f"{packages}, {commit}" + (f" ({checkout['note']})" if checkout["note"] else "")
