"""The algebra of the fast multipole view: what rank attention has once a band around its diagonal is taken out.

FMMformer writes attention as a band plus a matrix of low rank. For every head of a pretrained model, A is its exact
attention on a text and A_k what remains of it outside |i - j| < k (k = 0 takes out nothing, 1 the diagonal). The rank
needed for a tolerance ε is the smallest r whose best approximation errs by ε: ‖A_k - [A_k]_r‖_F ≤ ε ‖A‖_F, that is the
root of the sum of squares of the singular values after the first r. That is relative to the whole of A: the error of
band and low rank together. "own" is relative to A_k itself: whether what is far is smoother, or merely small.
"""

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..results import Table, rounded
from ..results.plots import draw_line
from .base import Advance, Result, Study, rows_with
from .pretrained import capture, describe, load, read_text

MEASURES = ("frobenius", "own")


@dataclass(frozen=True)
class RankStudy(Study):
    """`bands`: diagonals to each side, the main one included, that are taken out. `tolerances`: ε."""

    model: str | None = None
    text_file: str | None = None
    tokens: int = 256
    bands: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64)
    tolerances: tuple[float, ...] = (0.5, 0.2, 0.1, 0.05)
    seed: int = 0

    name: ClassVar[str] = "rank"
    full_settings: ClassVar[dict[str, Any]] = {"tokens": 512, "bands": (0, 1, 2, 4, 8, 16, 32, 64, 128)}

    @torch.no_grad()
    def measure(self, advance: Advance) -> Result:
        text = read_text(self.text_file)
        model, batch = load(self.model, text, self.tokens)
        weights = [layer.weights().double() for layer in capture(model, batch)]  # [H, L, L] each
        position = torch.arange(weights[0].shape[-1])
        distance = (position[:, None] - position[None]).abs()
        rows: list[dict[str, Any]] = []
        spectra: dict[str, list[float]] = {}
        whole: list[Tensor] = [torch.linalg.svdvals(matrix) for matrix in weights]
        for band in self.bands:
            values = whole
            if band:
                values = [torch.linalg.svdvals(matrix.masked_fill(distance < band, 0)) for matrix in weights]
            relative = torch.cat([v / w[:, :1] for v, w in zip(values, whole, strict=True)])
            spectra[str(band)] = [rounded(x, 3) for x in relative.median(0).values.tolist()]
            for layer, (remainder, all_of_it) in enumerate(zip(values, whole, strict=True)):
                columns = {
                    f"{measure} {tolerance:g}": ranks_needed(remainder, all_of_it, tolerance, measure)
                    for measure in MEASURES
                    for tolerance in self.tolerances
                }
                for head in range(len(remainder)):
                    row = {"layer": layer, "head": head, "band": band}
                    rows.append(row | {column: ranks[head] for column, ranks in columns.items()})
            advance(f"band {band}")
        description = describe(self.model or "", model, text)
        length = len(position)
        summary = self._summary(rows)
        return {"model": description, "tokens": length, "rows": rows, "spectra": spectra, "summary": summary}

    def _summary(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Median and quartiles over heads."""
        found = []
        for measure in MEASURES:
            for tolerance in self.tolerances:
                for band in self.bands:
                    ranks = [row[f"{measure} {tolerance:g}"] for row in rows if row["band"] == band]
                    low, median, high = statistics.quantiles(ranks, n=4, method="inclusive")
                    row = {"measure": measure, "tolerance": tolerance, "band": band}
                    found.append(row | {"median": median, "low": low, "high": high})
        return found

    @staticmethod
    def table(result: Result) -> Table:
        """Median rank over heads, by tolerance of the whole matrix and by band taken out."""
        bands = result["settings"]["bands"]
        summary = {(row["tolerance"], row["band"]): row for row in rows_with(result["summary"], measure="frobenius")}
        rows = [
            [f"{tolerance:g}", *(f"{summary[tolerance, band]['median']:.0f}" for band in bands)]
            for tolerance in result["settings"]["tolerances"]
        ]
        return Table(f"Rank needed, of {result['tokens']}", ["ε", *(f"without band {band}" for band in bands)], rows)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        return {"rank": _figure(result)}


def ranks_needed(values: Tensor, whole: Tensor, tolerance: float, measure: str) -> list[int]:
    """Smallest r for each row of singular values `[H, L]`; `whole` are those of the matrices nothing was taken from.

    >>> ranks_needed(torch.tensor([[3.0, 4e-3, 3e-3]]), torch.tensor([[5.0, 0.0, 0.0]]), 0.001, "frobenius")
    [1]
    """
    tails = values.square().flip(-1).cumsum(-1).flip(-1).sqrt()  # error of keeping the first 0, 1, 2, … values
    reference = (values if measure == "own" else whole).norm(dim=-1, keepdim=True)
    return (tails > tolerance * reference).sum(-1).tolist()


def _figure(result: Result) -> Figure:
    """Spectra by band, and the rank needed by band."""
    settings, spectra = result["settings"], result["spectra"]
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    right.sharey(middle)
    colors = matplotlib.colormaps["viridis"].resampled(len(spectra) + 1)
    for number, (band, values) in enumerate(spectra.items()):
        label = "nothing" if band == "0" else f"band {band}"
        left.plot(range(1, len(values) + 1), values, color=colors(number), label=label)
    left.set(
        xscale="log",
        yscale="log",
        ylim=(1e-5, 1.5),
        xlabel="i",
        ylabel="σᵢ / σ₁ of the whole, median over heads",
        title="Singular values, taken out:",
    )
    left.legend(frameon=False, fontsize=8)
    styles = zip(settings["tolerances"], ("#D55E00", "#E69F00", "#009E73", "#0072B2"), "osD^", strict=False)
    ticks = range(len(settings["bands"]))
    for tolerance, color, marker in styles:
        for axes, measure in ((middle, "frobenius"), (right, "own")):
            rows = rows_with(result["summary"], measure=measure, tolerance=tolerance)
            low, median, high = ([row[name] for row in rows] for name in ("low", "median", "high"))
            draw_line(axes, ticks, median, (low, high), color=color, marker=marker, label=f"ε = {tolerance:g}")
    for axes, title in ((middle, "of the whole matrix"), (right, "of what remains")):
        axes.set_xticks(ticks, settings["bands"])
        axes.set(title=f"Rank for ε {title}", xlabel="band taken out", ylim=(0, None))
    middle.set_ylabel("rank, median and quartiles over heads")
    middle.legend(frameon=False)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"Attention of {result['model']['name']} on {result['tokens']} tokens: a band and a low rank")
    return figure
