"""From which length on a mechanism is faster than softmax: out of measured times, and out of result files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results import SCHEMA_VERSION, hardware, machine, measured_crossover


def crossovers(cells: Iterable[Mapping[str, Any]], head_dim: int) -> list[dict[str, Any]]:
    """One for each mechanism, number of features, direction, pass and type, as results hold them."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["speed_over_softmax"] is not None:
            name = cell.get("attention", cell.get("name"))
            key = name, cell["features"], cell["causal"], cell["training"], cell["dtype"]
            groups.setdefault(key, []).append(cell)
    found = []
    for (name, features, causal, training, dtype), row in groups.items():
        lengths = [cell["length"] for cell in row]
        length, interpolated = measured_crossover(lengths, [cell["speed_over_softmax"] for cell in row])
        each = {"attention": name, "features": features, "head_dim": head_dim, "causal": causal, "training": training}
        found.append(each | {"dtype": dtype, "length": length, "interpolated": interpolated, "lengths": lengths})
    return found


@dataclass(frozen=True)
class Crossover:
    """`length`: from which on it was faster; None if it was at no length measured. `source`: what was measured, where,
    and the file that says so.
    """

    length: int | None
    source: str


def find_crossover(
    mechanism: str,
    *,
    head_dim: int,
    num_features: int | None,
    causal: bool,
    training: bool = False,
    folder: Path,
) -> Crossover | None:
    """What benchmarks on this machine found; None if there are none of this mechanism and direction.

    Results are looked for in `folder`. Of those whose processor is that
    of this machine, the one measured with the nearest head size and then the nearest number of features counts (the
    head size, if None is given); of equals the latest. Float32 goes before other types, and `bench ops`, which measures
    more lengths, before `bench model`.

    >>> find_crossover("favor+", head_dim=64, num_features=None, causal=False, folder=Path("no-such-folder")) is None
    True
    """
    wanted = head_dim if num_features is None else num_features
    here = hardware()

    def distance(candidate: tuple[Path, Mapping[str, Any], Mapping[str, Any]]) -> tuple[float, float, bool, bool]:
        _, document, found = candidate
        features = found["features"] or 1  # a band has none
        sizes = abs(math.log(found["head_dim"] / head_dim)), abs(math.log(features / wanted))
        return (*sizes, found["dtype"] != "float32", document["kind"] != "bench ops")

    candidates = [
        (path, document, found)
        for path, document in sorted(_results(folder), key=lambda each: each[1]["created"], reverse=True)
        if all(document["hardware"][key] == here[key] for key in ("device", "cpu", "cores"))
        for found in document["crossovers"]
        if (found["attention"], found["causal"], found["training"]) == (mechanism, causal, training)
    ]
    if not candidates:
        return None
    path, document, found = min(candidates, key=distance)
    return Crossover(found["length"], _source(path, document, found))


def _results(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Result files with crossovers; whatever else lies in the folder is not our business."""
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            continue
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            continue
        if str(document.get("kind")).startswith("bench ") and isinstance(document.get("crossovers"), list):
            yield path, document


def _source(path: Path, document: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    features = f", {found['features']} features" if found["features"] else ""
    direction = "causal" if found["causal"] else "bidirectional"
    lengths = found["lengths"]
    return (
        f"{path}: {document['kind'].removeprefix('bench ')}, {found['attention']}{features}, heads of "
        f"{found['head_dim']}, {direction} {'training' if found['training'] else 'inference'}, {found['dtype']}, "
        f"{lengths[0]:,} to {lengths[-1]:,} tokens, {machine(document['hardware'])}"
    )
