"""Mean squared error of the attention matrix by number of features, kind of feature and projection.

The matrix is exp(xᵀy), where queries and keys include the square root of the scale. The error is relative, mean
(Â - A)² over mean A², averaged over draws of x, y and ω; projections are compared on the same x and y. Inputs are
normal or sparse (with one nonzero coordinate), with mean |x|² = `squared_norm`; a second measurement varies that norm
at M = 4d.

Hadamard projections are the product (H D_k)…(H D_1) for k = 1 to 3.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ..features import FourierFeatures, PositiveFeatures, draw_projection
from ..features.maps import RandomFeatures
from ..features.projections import seeded_generator
from ..results.plots import Panel, draw, lines_of
from ..results.report import Table, number
from . import Advance, Result, Study, mean_columns, rows_with

KINDS = {"sincos": "sine and cosine", "positive": "positive"}
INPUTS = {"normal": "normal inputs", "sparse": "sparse inputs"}
IID = "iid"
PROJECTIONS = (IID, "orthogonal", "hadamard, 1 block", "hadamard, 2 blocks", "hadamard, 3 blocks")
SPARSE_LENGTH = 128  # number of sparse inputs, which have few distinct values; also used where the norm varies


@dataclass(frozen=True)
class MseStudy(Study):
    """`dims`: powers of two. `features`: values of M. `draws`: of inputs and ω. `norms`: squared, for M = 4d."""

    dims: tuple[int, ...] = (16, 64)
    features: tuple[int, ...] = (16, 64, 256, 1024)
    length: int = 1024
    squared_norm: float = 1.0
    norms: tuple[float, ...] = (0.0625, 0.25, 0.5, 1, 2, 4)
    draws: int = 4
    short_draws: int = 20
    seed: int = 0

    name: ClassVar[str] = "mse"
    full_settings: ClassVar[dict[str, Any]] = {"draws": 8, "short_draws": 40, "features": (16, 64, 256, 1024, 4096)}

    def measure(self, advance: Advance) -> Result:
        rows, norms = [], []
        sizes = {"normal": (self.length, self.draws), "sparse": (SPARSE_LENGTH, self.short_draws)}
        for dim, kind in itertools.product(self.dims, KINDS):
            iid: dict[float, float] = {}  # mean error by norm
            for projection in PROJECTIONS:
                advance(f"d = {dim}, {KINDS[kind]}, {projection}")
                for (inputs, (length, draws)), M in itertools.product(sizes.items(), self.features):
                    ones = (Draw(inputs, length, dim, self.squared_norm, self._seed(dim, i)) for i in range(draws))
                    errors = [one.error(kind, projection, M) for one in ones]
                    row = {"inputs": inputs, "dim": dim, "kind": kind, "features": M, "projection": projection}
                    rows.append(row | mean_columns("mse", errors))
                for norm in self.norms:
                    shape = "normal", SPARSE_LENGTH, dim, norm
                    ones = (Draw(*shape, self._seed(dim, i, 1)) for i in range(self.short_draws))
                    errors = [one.error(kind, projection, 4 * dim) for one in ones]
                    base = iid.setdefault(norm, statistics.fmean(errors))  # iid comes first
                    row = {"dim": dim, "kind": kind, "squared_norm": norm, "projection": projection}
                    norms.append(row | mean_columns("ratio", [error / base for error in errors]))
        return {"rows": rows, "norms": norms}

    def _seed(self, *numbers: int) -> Generator:
        return seeded_generator(self.seed, *numbers)

    @staticmethod
    def table(result: Result) -> Table:
        """Error relative to iid rows, with the largest number of features."""
        most = result["settings"]["features"][-1]
        lines = []
        for inputs, kind, dim in itertools.product(INPUTS, KINDS, result["settings"]["dims"]):
            rows = rows_with(_scores(result["rows"]), inputs=inputs, kind=kind, dim=dim, features=most)
            mse = {row["projection"]: row["mse"] for row in rows}
            ratios = (number(mse[projection] / mse[IID], 3) for projection in PROJECTIONS[1:])
            lines.append([f"{INPUTS[inputs]}, {KINDS[kind]}, d = {dim}", *ratios])
        title = f"Mean squared error of the attention matrix over that of iid projections, M = {most:,}"
        return Table(title, ["", *PROJECTIONS[1:]], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Error by M for both kinds of inputs, and error relative to iid rows by norm; one column per dimension."""
        settings = result["settings"]

        def grid(rows: list[dict[str, Any]], x: str, y: str, xlabel: str, ylabel: str, rate: Any = None) -> Any:
            def panel(kind: str, dim: int) -> Panel:
                lines = lines_of(rows_with(rows, kind=kind, dim=dim), x, y, "projection")
                return Panel(f"{KINDS[kind]} features, d = {dim}", xlabel, ylabel, lines, rate)

            return [[panel(kind, dim) for dim in settings["dims"]] for kind in KINDS]

        figures = {}
        for inputs, draws in zip(INPUTS, (settings["draws"], settings["short_draws"]), strict=True):
            what = f"{INPUTS[inputs]} with |x|² = {settings['squared_norm']:g}, {draws} draws (bands: standard error)"
            rows = rows_with(_scores(result["rows"]), inputs=inputs)
            panels = grid(rows, "features", "mse", "M, features", "relative mean squared error", (-1, "1/M"))
            figures[f"mse_{inputs}"] = draw(f"Error of the attention matrix, {what}", panels)
        what = f"normal inputs, M = 4d, {settings['short_draws']} draws (bands: standard error)"
        panels = grid(_scores(result["norms"]), "squared_norm", "ratio", "|x|²", "error / error of iid rows")
        return figures | {"mse_norms": draw(f"Gain from orthogonality by norm: {what}", panels)}


class Draw:
    """One draw of queries and keys with their exact attention matrix."""

    def __init__(self, inputs: str, length: int, dim: int, squared_norm: float, generator: Generator):
        self.dim, self.generator = dim, generator
        self.x, self.y = (self._points(inputs, length, squared_norm) for _ in range(2))
        self.exact = torch.exp(self.x @ self.y.mT)

    def _points(self, inputs: str, length: int, squared_norm: float) -> Tensor:
        if inputs == "normal":
            points = torch.randn(1, 1, length, self.dim, generator=self.generator) / self.dim**0.5
        else:
            chosen = torch.randint(2 * self.dim, (1, 1, length), generator=self.generator)
            points = F.one_hot(chosen % self.dim, self.dim) * torch.where(chosen < self.dim, 1.0, -1.0).unsqueeze(-1)
        return points * squared_norm**0.5

    def error(self, kind: str, projection: str, M: int) -> float:
        """Relative mean squared error with a new draw of ω."""
        feature_map: RandomFeatures
        if kind == "positive":
            feature_map = PositiveFeatures(1, M, self.dim, (0,), projection="iid")
        else:
            feature_map = FourierFeatures(1, M, self.dim, (0,), projection="iid", normalize_qk=False)
        feature_map.projection.copy_(draw_rows(projection, feature_map.projection.shape, self.generator))
        q, k = feature_map("query").exactly(self.x).dense(), feature_map("key").exactly(self.y).dense()
        return float((q @ k.mT - self.exact).square().mean() / self.exact.square().mean())


def draw_rows(name: str, shape: Sequence[int], generator: Generator) -> Tensor:
    """Independent draws of ω for a name in `results.plots.STYLES`; `shape` is (draws, rows, dim)."""
    draws, rows, dim = shape
    kind, _, count = name.partition(", ")
    return draw_projection(kind, draws, rows, dim, generator, int(count[0]) if count else 3)  # type: ignore[arg-type]


def _scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop errors of normalised rows and of other projections, which older documents contain."""
    return [row for row in rows if row.get("matrix", "scores") == "scores" and row["projection"] in PROJECTIONS]
