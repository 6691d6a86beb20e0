"""Plots, tables and conclusions of the study "mse", made from its document alone."""

from typing import Any

from matplotlib.figure import Figure

from .base import Result
from .plotting import draw_band, log_ticks, rate_line

KINDS = {"sincos": "sine and cosine", "positive": "positive"}
INPUTS = {"normal": "normal inputs", "sparse": "sparse inputs"}
IID, ORTHOGONAL, ONE, TWO, THREE = "iid", "orthogonal", "hadamard, 1 block", "hadamard, 2 blocks", "hadamard, 3 blocks"
SUM = "sum of 3 blocks"
PROJECTIONS = (IID, ORTHOGONAL, ONE, TWO, THREE, SUM)
Row = dict[str, Any]


def _find(rows: list[Row], **wanted: Any) -> Row:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def tables(result: Result) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and lines: errors over those of iid rows."""
    columns = [(kind, dim) for kind in KINDS for dim in result["settings"]["dims"]]
    heads = ["projection", *(f"{KINDS[kind]}, d = {dim}" for kind, dim in columns)]
    found = []
    for inputs in INPUTS:
        lines = []
        for projection in PROJECTIONS[1:]:
            cells = []
            for kind, dim in columns:
                chosen = {"inputs": inputs, "dim": dim, "kind": kind, "matrix": "scores", "projection": projection}
                row = _find(result["over_iid"], **chosen)
                cells.append(f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})")
            lines.append([projection, *cells])
        title = f"Mean squared error over that of iid rows, {INPUTS[inputs]} (mean over M, 95 % interval)"
        found.append((title, heads, lines))
    return found


def conclusions(result: Result) -> list[str]:
    settings, cosines = result["settings"], result["cosines"]
    dims, last = settings["dims"], settings["features"][-1]

    def over_iid(kind: str, dim: int, projection: str) -> str:
        chosen = {"inputs": "normal", "dim": dim, "kind": kind, "matrix": "scores", "projection": projection}
        row = _find(result["over_iid"], **chosen)
        return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"

    def at_last(inputs: str, kind: str, dim: int, projection: str, other: str = ORTHOGONAL) -> str:
        chosen = {"inputs": inputs, "dim": dim, "kind": kind, "matrix": "scores", "projection": projection}
        row = _find(result["rows"], **chosen, features=last)
        return verdict(row[f"over_{other}"], row[f"over_{other}_low"], row[f"over_{other}_high"])

    sentences = []
    for kind, name in KINDS.items():
        parts = [
            f"d = {dim}, orthogonal {over_iid(kind, dim, ORTHOGONAL)}, Hadamard with 1, 2, 3 blocks "
            + ", ".join(over_iid(kind, dim, blocks) for blocks in (ONE, TWO, THREE))
            for dim in dims
        ]
        sentences.append(
            f"{name.capitalize()} features, normal inputs, |x|² = {settings['squared_norm']:g}, mean squared error "
            f"over that of iid rows, mean over M: {'; '.join(parts)}."
        )
    for projection, words in (
        (ONE, "One Hadamard block"),
        (THREE, "Three Hadamard blocks"),
    ):
        parts = [
            f"{KINDS[kind]}, d = {dim}, {at_last('normal', kind, dim, projection)}" for kind in KINDS for dim in dims
        ]
        sentences.append(f"{words}, error over that of orthogonal rows at M = {last:,}: {'; '.join(parts)}.")
    parts = [
        f"{words}, d = {dim}, {at_last('sparse', 'sincos', dim, projection)}"
        for words, projection in (("one block", ONE), ("three blocks", THREE))
        for dim in dims
    ]
    sentences.append(
        f"Sparse inputs, error over that of orthogonal rows (sine and cosine, M = {last:,}): {'; '.join(parts)}."
    )
    angles = " and ".join(f"{cosines[str(dim)][SUM]:.2f} (d = {dim})" for dim in dims)
    parts = [f"d = {dim}, {at_last('normal', 'sincos', dim, SUM, IID)}" for dim in dims]
    sentences.append(
        "A sum of blocks, in place of their product, is no rotation: rows of the sum of three meet "
        f"at a mean |cosine| of {angles}, rows of the product at {max(c[THREE] for c in cosines.values()):.2f}; its "
        f"error over that of iid rows (normal inputs, sine and cosine, M = {last:,}): {'; '.join(parts)}."
    )
    parts = []
    for dim in dims:
        chosen = {"dim": dim, "kind": "sincos", "matrix": "scores", "projection": ORTHOGONAL}
        gains = [_find(result["norms"], **chosen, squared_norm=norm)["ratio"] for norm in settings["norms"]]
        parts.append(f"d = {dim}, {', '.join(f'{gain:.2f}' for gain in gains)}")
    sentences.append(
        "What orthogonal rows gain, by norm: error over that of iid rows (sine and cosine, M = 4d) for "
        f"|x|² = {', '.join(f'{norm:g}' for norm in settings['norms'])}: {'; '.join(parts)}."
    )
    return sentences


def verdict(ratio: float, low: float, high: float) -> str:
    """
    >>> verdict(1.5, 1.2, 1.9)
    '1.50 (1.20 to 1.90), above'
    """
    word = "no difference seen" if low <= 1 <= high else "below" if high < 1 else "above"
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}), {word}"


def error_figure(result: Result, inputs: str) -> Figure:
    """A row each kind of feature, a column each dimension."""
    settings = result["settings"]
    rows = [row for row in result["rows"] if row["inputs"] == inputs and row["matrix"] == "scores"]
    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.subplots(len(KINDS), len(settings["dims"]), sharex=True, sharey="row", squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items(), strict=True):
        for axes, dim in zip(line, settings["dims"], strict=True):
            for projection in PROJECTIONS:
                wanted = (kind, dim, projection)
                chosen = [row for row in rows if (row["kind"], row["dim"], row["projection"]) == wanted]
                draw_band(axes, "features", "mse", chosen, projection)
            axes.set_title(f"{title} features, d = {dim}")
        line[0].set_ylabel("relative mean squared error")
        top = max(row["mse"] for row in rows if row["kind"] == kind)
        for axes in line:
            rate_line(axes, settings["features"], 2 * top, -1, "1/M")
    for axes in grid[-1]:
        axes.set_xlabel("M, features")
    size = f"L = {settings['length']:,}, {settings['draws']} draws"
    if inputs == "sparse":
        size = f"{settings['short_draws']} draws"
    figure.suptitle(
        f"Error of the attention matrix, {INPUTS[inputs]} with |x|² = {settings['squared_norm']:g}, {size} "
        "(bands: 95 %)"
    )
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PROJECTIONS), frameon=False)
    return figure


def norm_figure(result: Result) -> Figure:
    """Error over that of iid rows, by norm, without means that a few draws rule."""
    settings = result["settings"]
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    grid = figure.subplots(len(KINDS), len(settings["dims"]), sharex=True, sharey=True, squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items(), strict=True):
        for axes, dim in zip(line, settings["dims"], strict=True):
            for projection in PROJECTIONS:
                wanted = (dim, kind, "scores", projection)
                rows = [
                    row
                    for row in result["norms"]
                    if (row["dim"], row["kind"], row["matrix"], row["projection"]) == wanted
                    and row["effective_draws"] >= settings["short_draws"] / 4
                ]
                draw_band(axes, "squared_norm", "ratio", rows, projection)
            if dim**0.5 <= settings["norms"][-1]:
                axes.axvline(dim**0.5, color="black", linewidth=0.8, linestyle=":")
            axes.set_title(f"{title} features, d = {dim}")
            axes.set_ylim(0.02, 3)
            log_ticks(axes, settings["norms"])
        line[0].set_ylabel("error / error of iid rows")
    for axes in grid[-1]:
        axes.set_xlabel("|x|², dotted: of standard normal q and k")
    figure.suptitle(
        f"What orthogonality gains, by norm: normal inputs, M = 4d, {settings['short_draws']} draws (bands: 95 %)\n"
        "left out: means that less than a quarter of the draws rule"
    )
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PROJECTIONS), frameon=False)
    return figure
