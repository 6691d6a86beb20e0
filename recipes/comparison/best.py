"""The best model of a comparison, with a card that shows it beside softmax and the controls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.output import MODEL

from hf_rfattn import write_card
from hf_rfattn.results import RESULTS, read_results, write_result

from .plan import folder_of
from .summary import KIND
from .tables import kind


class Best(NamedTuple):
    row: str
    folder: Path


def best_checkpoint(summary: Mapping[str, Any], output: Path) -> Best | None:
    """Of the first task: the best row that is neither softmax nor a control, if its model was kept. Its card is written
    anew, from all results it may be compared with.
    """
    table = next(iter(summary["accuracy"]), None)
    rows = [row for row in table["rows"] if not kind(row["attention"], row["control"])] if table else []
    if table is None or not rows:
        return None
    sign = -1 if table["lower_is_better"] else 1
    best = max(rows, key=lambda row: sign * row["metric"]["mean"])["row"]
    results = [result for result in read_results(output / RESULTS) if KIND in result.document]
    same = [r for r in results if r.document["processes"] == table["processes"] and r.budget == table["budget"]]
    places = [(r.document[KIND]["part"], r.document[KIND]["row"]) for r in same]
    own = same[places.index((table["part"], best))]
    folder = folder_of(output, Path(own.file).stem) / MODEL
    if not folder.is_dir():
        return None
    for stale in (folder / RESULTS).glob("*.json"):
        stale.unlink()
    for result in same:
        if result.measured_on == own.measured_on:
            write_result(result.document, folder / RESULTS / result.file)
    write_card(folder)
    return Best(best, folder)
