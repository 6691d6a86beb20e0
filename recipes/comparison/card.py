"""The best model of a comparison, with a card that shows it beside softmax and the controls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.output import MODEL

from hf_rfattn.hub.cards import write_card
from hf_rfattn.results import RESULTS, parse_result, write_result

from .plan import folder_of
from .report import kind
from .summary import KIND


@dataclass(frozen=True)
class Best:
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
    best = max(rows, key=lambda row: sign * row["metric"]["mean"])
    results = [parse_result(json.loads(p.read_text()), p.name) for p in sorted((output / RESULTS).glob("*.json"))]
    own = next(
        result
        for result in results
        if result.document.get(KIND, {}).get("part") == table["part"]
        and result.document[KIND]["row"] == best["row"]
        and result.document["processes"] == table["processes"]
        and result.budget == table["budget"]
    )
    folder = folder_of(output, Path(own.file).stem) / MODEL
    if not folder.is_dir():
        return None
    for stale in (folder / RESULTS).glob("*.json"):
        stale.unlink()
    for result in results:
        if result.measured_on == own.measured_on and result.document["processes"] == table["processes"]:
            write_result(dict(result.document), folder / RESULTS / result.file)
    write_card(folder)
    return Best(best["row"], folder)
