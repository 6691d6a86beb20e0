"""Rank of attention matrices after removing a band around the diagonal.

FMMformer approximates attention by a band plus a low-rank matrix. For every head of a pretrained model, A is its exact
attention on a text, and A_k is A without the entries with |i - j| < k (k = 0 removes nothing, 1 the diagonal). The rank
needed for a tolerance ε is the smallest r whose best rank-r approximation satisfies ‖A_k - [A_k]_r‖_F ≤ ε ‖A‖_F; the
left side is the root of the sum of squares of all singular values after the first r. This is relative to all of A: the
error of band and low rank together. "own" is relative to A_k, and shows whether the far part is smoother or just small.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..results.documents import rounded
from ..results.plots import Line, Panel, draw
from ..results.report import Table
from . import Advance, Result, Study, rows_with
from .pretrained import capture, describe, load, read_text

MEASURES = {"frobenius": "the whole matrix", "own": "the rest"}


@dataclass(frozen=True)
class RankStudy(Study):
    """`bands`: numbers of diagonals removed on each side, including the main one. `tolerances`: ε."""

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
        whole = [torch.linalg.svdvals(matrix) for matrix in weights]
        for band in self.bands:
            advance(f"band {band}")
            remainders = [torch.linalg.svdvals(matrix.masked_fill(distance < band, 0)) for matrix in weights]
            relative = torch.cat([v / w[:, :1] for v, w in zip(remainders, whole, strict=True)])
            spectra[str(band)] = [rounded(x, 3) for x in relative.median(0).values.tolist()]
            for layer, (remainder, all_of_it) in enumerate(zip(remainders, whole, strict=True)):
                ranks = {
                    f"{measure} {tolerance:g}": ranks_needed(remainder, all_of_it, tolerance, measure)
                    for measure, tolerance in itertools.product(MEASURES, self.tolerances)
                }
                for head, values in enumerate(zip(*ranks.values(), strict=True)):
                    row = {"layer": layer, "head": head, "band": band}
                    rows.append(row | dict(zip(ranks, values, strict=True)))
        summary = []
        for measure, tolerance, band in itertools.product(MEASURES, self.tolerances, self.bands):
            needed = [row[f"{measure} {tolerance:g}"] for row in rows_with(rows, band=band)]
            low, median, high = statistics.quantiles(needed, n=4, method="inclusive")
            labels = {"measure": measure, "tolerance": tolerance, "band": band}
            summary.append(labels | {"median": median, "low": low, "high": high})
        about = {"model": describe(self.model, model, text), "tokens": len(position)}
        return about | {"rows": rows, "spectra": spectra, "summary": summary}

    @staticmethod
    def table(result: Result) -> Table:
        """Median rank over heads, by tolerance (relative to the whole matrix) and removed band."""
        bands = result["settings"]["bands"]
        summary = {(row["tolerance"], row["band"]): row for row in rows_with(result["summary"], measure="frobenius")}
        rows = [
            [f"{tolerance:g}", *(f"{summary[tolerance, band]['median']:.0f}" for band in bands)]
            for tolerance in result["settings"]["tolerances"]
        ]
        return Table(f"Rank needed, of {result['tokens']}", ["ε", *(f"without band {band}" for band in bands)], rows)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Spectra and needed rank by removed band: medians and quartiles over heads."""
        bands, spectra = result["settings"]["bands"], result["spectra"]
        tolerances = result["settings"]["tolerances"]
        shades = matplotlib.colormaps["viridis"].resampled(max(len(spectra), len(tolerances)) + 1)
        lines = [
            Line(f"without band {band}", range(1, len(values) + 1), values, style={"color": shades(i), "marker": ""})
            for i, (band, values) in enumerate(spectra.items())
        ]
        panels = [Panel("Singular values", "index i", "σᵢ / σ₁ of the whole matrix, median over heads", lines)]
        for measure, of in MEASURES.items():
            lines = []
            for i, tolerance in enumerate(tolerances):
                rows = rows_with(result["summary"], measure=measure, tolerance=tolerance)
                low, median, high = ([row[name] for row in rows] for name in ("low", "median", "high"))
                style = {"color": shades(i), "marker": "osD^v"[i % 5]}
                lines.append(Line(f"ε = {tolerance:g}", range(len(rows)), median, (low, high), style=style))
            panels.append(Panel(f"Rank for error ε of {of}", "removed band", "rank", lines, categories=bands))
        what = f"Attention of {result['model']['name']} on {result['tokens']} tokens: a band and a low rank"
        return {"rank": draw(what, [panels], 4.3)}


def ranks_needed(values: Tensor, whole: Tensor, tolerance: float, measure: str) -> list[int]:
    """Smallest r for each row of singular values `[H, L]`; `whole`: singular values of the full matrices.

    >>> ranks_needed(torch.tensor([[3.0, 4e-3, 3e-3]]), torch.tensor([[5.0, 0.0, 0.0]]), 0.001, "frobenius")
    [1]
    """
    tails = values.square().flip(-1).cumsum(-1).flip(-1).sqrt()  # error with the first 0, 1, 2, … values
    reference = (values if measure == "own" else whole).norm(dim=-1, keepdim=True)
    return (tails > tolerance * reference).sum(-1).tolist()
