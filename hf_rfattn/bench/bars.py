"""What `favor+` is meant to reach on two threads of a CPU, and whether a run of `bench ops` shows it.

Every bar is a number out of the cells of one result: the worst over the lengths (and features) it is about.
"""

from collections.abc import Callable, Iterator
from typing import Any

from ..results import rounded
from .peers import FAST_TRANSFORMERS, PERFORMER

SHAPE = {"heads": 12, "head_dim": 64, "threads": 2}  # batch times heads
GIGABYTE = 10**9
AT_LEAST, AT_MOST = "at least", "at most"
MET = {True: "met", False: "not met", None: "not measured"}

Cells = list[dict[str, Any]]


def bars(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with what it is about, its value, the bound and whether it is met; met is null where nothing was measured.

    Empty for a run in another shape or with other threads than the bars are about.
    """
    shape = document["shape"]
    found = {
        "heads": shape["batch"] * shape["heads"],
        "head_dim": shape["head_dim"],
        "threads": document["hardware"]["threads"],
    }
    if found != SHAPE or document["hardware"]["device"] != "cpu":
        return []
    cells = [cell for cell in document["cells"] if cell["name"] == "favor+" and cell["dtype"] == "float32"]
    return list(_bars([cell for cell in cells if cell["kind"] == "mechanism"], document))


def _bars(cells: Cells, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def chosen(causal: bool, training: bool, features: int | None, least: int, most: int | None = None) -> Cells:
        return [
            cell
            for cell in cells
            if (cell["causal"], cell["training"]) == (causal, training)
            and features in (None, cell["features"])
            and least <= cell["length"] <= (most or cell["length"])
        ]

    def over_peer(name: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda cell: cell.get("speed_over_peers", {}).get(name)

    def over_softmax(cell: dict[str, Any]) -> float | None:
        return cell["speed_over_softmax"]

    def over_limit(cell: dict[str, Any]) -> float | None:
        return cell.get("time_over_limit")

    for name, causal, training, features, least, bound in (
        (PERFORMER, False, False, 64, 1024, 1.8),
        (FAST_TRANSFORMERS, False, False, 64, 1024, 1.5),
        (PERFORMER, False, True, 64, 1024, 1.8),
        (FAST_TRANSFORMERS, False, False, 256, 4096, 2.5),
        (FAST_TRANSFORMERS, True, False, 64, 1024, 1.5),
    ):
        what = f"speed over {name}, {_round(causal, training)}, M = {features}, L ≥ {least:,}"
        yield _worst(what, chosen(causal, training, features, least), over_peer(name), AT_LEAST, bound, over_limit)
    for causal, features, most in ((False, 64, 384), (True, 64, 768), (False, 256, 1024)):
        yield _crossover(document, causal, features, most)
    for causal, bound in ((False, 15), (True, 6)):
        what = f"speed over softmax, {_round(causal, False)}, M = 64, L = 8,192"
        yield _worst(what, chosen(causal, False, 64, 8192, 8192), over_softmax, AT_LEAST, bound)
    for causal in (False, True):
        for training in (False, True):
            what = f"time over that of the matrix products alone, {_round(causal, training)}, L ≥ 1,024"
            yield _worst(what, chosen(causal, training, None, 1024), over_limit, AT_MOST, 2)
    for causal in (False, True):
        for training in (False, True):
            yield _growth(causal, training, chosen(causal, training, 64, 4096))
    for causal in (False, True):
        yield _memory(document, causal)


def _round(causal: bool, training: bool) -> str:
    return f"{'causal' if causal else 'bidirectional'} {'forward and backward' if training else 'forward'}"


def _bar(what: str, value: float | None, relation: str, bound: float, unit: str, where: str = "") -> dict[str, Any]:
    met = None if value is None else (value >= bound if relation == AT_LEAST else value <= bound)
    return {
        "what": what,
        "value": value,
        "relation": relation,
        "bound": bound,
        "unit": unit,
        "met": met,
        "where": where,
    }


def _worst(
    what: str,
    cells: Cells,
    value: Callable[[dict[str, Any]], float | None],
    relation: str,
    bound: float,
    over_limit: Callable[[dict[str, Any]], float | None] = lambda cell: None,
) -> dict[str, Any]:
    """`over_limit`: how far a cell is from its matrix products alone, where they bound what can be reached."""
    rows = [(found, cell) for cell in cells if (found := value(cell)) is not None]
    if not rows:
        return _bar(what, None, relation, bound, "×")
    worst, cell = (min if relation == AT_LEAST else max)(rows, key=lambda row: row[0])
    where, slower = f"M = {cell['features']}, L = {cell['length']:,}", over_limit(cell)
    if slower is not None:
        where += f"; its matrix products alone would give {worst * slower:.2f} ×"
    bar = _bar(what, worst, relation, bound, "×", where)
    return bar if bar["met"] else bar | {"where": where + _bounds(cell)}


def _bounds(cell: dict[str, Any]) -> str:
    """What a cell's time is made of, as far as its parts were run alone."""
    shares = cell.get("shares")
    if not shares:
        return ""
    told = [f"{part} {100 * share:.0f} %" for part, share in shares.items()]
    rest = "passes over features, products that backward computes again" if cell["training"] else "passes over features"
    share = max(0.0, 1 - sum(shares.values()))
    return f"; of its time: {', '.join(told)}, the rest ({rest}, waiting) {100 * share:.0f} %"


def _crossover(document: dict[str, Any], causal: bool, features: int, most: int) -> dict[str, Any]:
    wanted = {"attention": "favor+", "features": features, "causal": causal, "training": False, "dtype": "float32"}
    what = f"crossover with softmax, {_round(causal, False)}, M = {features}"
    for found in document["crossovers"]:
        if all(found[key] == value for key, value in wanted.items()):
            if found["length"] is None:
                beyond = f"beyond {max(found['lengths']):,}"
                return _bar(what, None, AT_MOST, most, "tokens", beyond) | {"met": False}
            if found["length"] > most and found["interpolated"] is None:
                break  # faster at the shortest length, which is too long to tell
            between = found["interpolated"]
            where = f"equal at about {between:,}" if between else "faster at the shortest length"
            return _bar(what, found["length"], AT_MOST, most, "tokens", where)
    return _bar(what, None, AT_MOST, most, "tokens")


def _growth(causal: bool, training: bool, cells: Cells) -> dict[str, Any]:
    times = {cell["length"]: cell["milliseconds"]["median"] for cell in cells}
    growth = rounded(times[16384] / times[4096]) if {4096, 16384} <= set(times) else None
    what = f"growth of time from 4,096 to 16,384 tokens, {_round(causal, training)}, M = 64"
    bar = _bar(what, growth, AT_MOST, 4.6, "×")
    both = [cell for cell in cells if cell["length"] in (4096, 16384) and "shares" in cell]
    if bar["met"] is not False or len(both) < 2:
        return bar
    told = " and ".join(f"{100 * cell['shares']['fresh memory']:.0f} % at {cell['length']:,}" for cell in both)
    return bar | {"where": f"fetching fresh memory for the results takes {told} tokens"}


def _memory(document: dict[str, Any], causal: bool) -> dict[str, Any]:
    direction = "causal" if causal else "bidirectional"
    what = f"memory of a training step of one {direction} layer, M = 64, L = 65,536"
    for row in document["memory"]:
        wanted = (row["name"], row["features"], row["causal"], row["length"]) == ("favor+", 64, causal, 65536)
        if wanted and "step_bytes" in row:
            where = f"the whole process {row['peak_bytes'] / GIGABYTE:.2f} GB"
            return _bar(what, rounded(row["step_bytes"] / GIGABYTE, 3), AT_MOST, 4, "GB", where)
    return _bar(what, None, AT_MOST, 4, "GB")
