"""Mean squared error of the attention matrix against the number of features, by kind of feature and projection.

The matrix is exp(xᵀy) of queries and keys that carry the square root of the scale, before and after its rows are
normalised. Its error is relative, mean (Â - A)² over mean A², averaged over draws of x, y and ω; intervals are of 95 %,
and projections are compared on the same x and y. Inputs are normal, or sparse (one coordinate of each is not zero, as
in heads that a few coordinates rule), with mean |x|² = `squared_norm`; a second measurement varies that norm at M = 4d.

Hadamard blocks are a product, (H D_k)…(H D_1), for k = 1 to 3. The unpublished report that this project grew from
measured one block, at d = 16, and prints more as a sum, H D_1 + … + H D_k: the sum of three is here too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ..features import FourierFeatures, PositiveFeatures
from ..features.maps import RandomFeatures
from ..features.projections import seeded_generator
from ..ops.naive import normalised_weights
from ..results.plots import draw_rows, line_style, log_log, rate_line, title_and_legend
from .base import Advance, Result, Study, rows_with
from .intervals import Interval, effective_count, mean_interval, ratio_interval
from .projections import draw, use_projection

KINDS = {"sincos": "sine and cosine", "positive": "positive"}
INPUTS = {"normal": "normal inputs", "sparse": "sparse inputs"}
IID, ORTHOGONAL, ONE, TWO, THREE = "iid", "orthogonal", "hadamard, 1 block", "hadamard, 2 blocks", "hadamard, 3 blocks"
SUM = "sum of 3 blocks"
PROJECTIONS = (IID, ORTHOGONAL, ONE, TWO, THREE, SUM)
SPARSE_LENGTH = 128  # of sparse inputs, which have few different values, and where the norm varies


@dataclass(frozen=True)
class MseStudy(Study):
    """`dims`: powers of two. `features`: lengths of φ. `draws`: of inputs and ω. `norms`: squared, for M = 4d."""

    dims: tuple[int, ...] = (16, 64)
    features: tuple[int, ...] = (16, 64, 256, 1024)
    length: int = 1024
    squared_norm: float = 1.0
    norms: tuple[float, ...] = (0.0625, 0.25, 0.5, 1, 2, 4)
    draws: int = 4
    short_draws: int = 20
    seed: int = 0

    name: ClassVar[str] = "mse"
    full_settings: ClassVar[dict[str, Any]] = {
        "draws": 8,
        "short_draws": 40,
        "features": (16, 64, 256, 1024, 4096),
    }

    def measure(self, advance: Advance) -> Result:
        errors: dict[tuple[Any, ...], list[float]] = {}
        by_norm: dict[tuple[Any, ...], list[float]] = {}

        def add(
            samples: dict[tuple[Any, ...], list[float]], key: tuple[Any, ...], one: Draw, kind: str, M: int
        ) -> None:
            for projection in PROJECTIONS:
                for matrix, error in one.errors(kind, projection, M).items():
                    samples.setdefault((*key, matrix, projection), []).append(error)
            advance(f"d = {one.dim}, {KINDS[kind]}")

        for dim in self.dims:
            for inputs, length, draws in (
                ("normal", self.length, self.draws),
                ("sparse", SPARSE_LENGTH, self.short_draws),
            ):
                for number in range(draws):
                    one = Draw(inputs, length, dim, self.squared_norm, seeded_generator(self.seed, dim, number))
                    for kind in KINDS:
                        for M in self.features:
                            add(errors, (inputs, dim, kind, M), one, kind, M)
            for number in range(self.short_draws):
                for norm in self.norms:
                    one = Draw("normal", SPARSE_LENGTH, dim, norm, seeded_generator(self.seed, dim, number, 1))
                    for kind in KINDS:
                        add(by_norm, (dim, kind, norm), one, kind, 4 * dim)
        return {
            "rows": self._rows(errors),
            "over_iid": self._compare(errors, IID),
            "over_orthogonal": self._compare(errors, ORTHOGONAL),
            "norms": self._norms(by_norm),
            "cosines": self._cosines(),
        }

    def _rows(self, errors: dict[tuple[Any, ...], list[float]]) -> list[dict[str, Any]]:
        names = ("inputs", "dim", "kind", "features", "matrix", "projection")
        rows = []
        for key, samples in errors.items():
            interval = mean_interval(samples)
            row = dict(zip(names, key, strict=True))
            row |= {"mse": interval.mean, "low": interval.low, "high": interval.high}
            for other in (IID, ORTHOGONAL):
                same_inputs = (*key[:-1], other)
                row |= _columns(f"over_{other}", ratio_interval([(samples, errors[same_inputs])]))
            rows.append(row)
        return rows

    def _compare(self, errors: dict[tuple[Any, ...], list[float]], other: str) -> list[dict[str, Any]]:
        """Error of each projection over that of another one, mean over M."""
        found = []
        cases = dict.fromkeys((*key[:3], *key[4:]) for key in errors)
        for inputs, dim, kind, matrix, projection in cases:
            pairs = [
                (errors[inputs, dim, kind, M, matrix, projection], errors[inputs, dim, kind, M, matrix, other])
                for M in self.features
            ]
            row = {"inputs": inputs, "dim": dim, "kind": kind, "matrix": matrix, "projection": projection}
            found.append(row | _columns("ratio", ratio_interval(pairs)))
        return found

    def _norms(self, errors: dict[tuple[Any, ...], list[float]]) -> list[dict[str, Any]]:
        found = []
        for (dim, kind, norm, matrix, projection), samples in errors.items():
            ratio = ratio_interval([(samples, errors[dim, kind, norm, matrix, IID])])
            row = {"dim": dim, "kind": kind, "squared_norm": norm, "matrix": matrix, "projection": projection}
            row |= {"mse": mean_interval(samples).mean, "ratio": ratio.mean, "low": ratio.low, "high": ratio.high}
            counts = [effective_count(x) for x in (samples, errors[dim, kind, norm, matrix, IID])]
            found.append(row | {"effective_draws": round(min(counts), 1)})
        return found

    def _cosines(self) -> dict[str, dict[str, float]]:
        """Mean |cosine| between the rows of one block, by dimension: 0 for a rotation."""
        found: dict[str, dict[str, float]] = {}
        for dim in self.dims:
            others = ~torch.eye(dim, dtype=torch.bool)
            for projection in PROJECTIONS:
                omega = draw(projection, (20, dim, dim), seeded_generator(self.seed, dim))
                rows = F.normalize(omega, dim=-1)
                found.setdefault(str(dim), {})[projection] = round(float((rows @ rows.mT).abs()[:, others].mean()), 4)
        return found

    @staticmethod
    def conclusions(result: Result) -> list[str]:
        return _conclusions(result)


class Draw:
    """Queries and keys of one draw with their exact attention matrix, and errors on them."""

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

    def errors(self, kind: str, projection: str, M: int) -> dict[str, float]:
        """Relative mean squared error of a fresh ω, before and after rows are normalised."""
        feature_map: RandomFeatures
        if kind == "positive":
            feature_map = PositiveFeatures(1, M, self.dim, (0,), projection="iid")
        else:
            feature_map = FourierFeatures(1, M, self.dim, (0,), projection="iid", normalize_qk=False)
        use_projection(feature_map, draw(projection, feature_map.projection.shape, self.generator))
        phi = feature_map("query")
        q, k = phi.exactly(self.x), feature_map("key").exactly(self.y)
        scores = q.dense() @ k.dense().mT
        floor = None if phi.floor is None else phi.floor * torch.exp(q.log + k.log.mT)
        weights = normalised_weights(scores, torch.ones_like(scores, dtype=torch.bool), floor)
        exact_weights = self.exact / self.exact.sum(-1, keepdim=True)
        return {"scores": _relative(scores, self.exact), "weights": _relative(weights, exact_weights)}


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean() / exact.square().mean())


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _conclusions(result: Result) -> list[str]:
    settings, cosines = result["settings"], result["cosines"]
    dims, last = settings["dims"], settings["features"][-1]

    def over_iid(kind: str, dim: int, projection: str) -> str:
        chosen = {"inputs": "normal", "dim": dim, "kind": kind, "matrix": "scores", "projection": projection}
        row = rows_with(result["over_iid"], **chosen)[0]
        return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"

    def at_last(inputs: str, kind: str, dim: int, projection: str, other: str = ORTHOGONAL) -> str:
        chosen = {"inputs": inputs, "dim": dim, "kind": kind, "matrix": "scores", "projection": projection}
        row = rows_with(result["rows"], **chosen, features=last)[0]
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
        gains = [row["ratio"] for row in rows_with(result["norms"], **chosen)]
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
    rows = rows_with(result["rows"], inputs=inputs, matrix="scores")
    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.subplots(len(KINDS), len(settings["dims"]), sharex=True, sharey="row", squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items(), strict=True):
        for axes, dim in zip(line, settings["dims"], strict=True):
            for projection in PROJECTIONS:
                chosen = rows_with(rows, kind=kind, dim=dim, projection=projection)
                draw_rows(axes, chosen, "features", "mse", label=projection, **line_style(projection))
            axes.set_title(f"{title} features, d = {dim}")
        line[0].set_ylabel("relative mean squared error")
        top = max(row["mse"] for row in rows if row["kind"] == kind)
        for axes in line:
            rate_line(axes, settings["features"], 2 * top, -1, "1/M")
            log_log(axes, settings["features"])
    for axes in grid[-1]:
        axes.set_xlabel("M, features")
    size = f"L = {settings['length']:,}, {settings['draws']} draws"
    if inputs == "sparse":
        size = f"{settings['short_draws']} draws"
    what = f"{INPUTS[inputs]} with |x|² = {settings['squared_norm']:g}"
    title_and_legend(figure, f"Error of the attention matrix, {what}, {size} (bands: 95 %)")
    return figure


def norm_figure(result: Result) -> Figure:
    """Error over that of iid rows, by norm, without means that a few draws rule."""
    settings = result["settings"]
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    grid = figure.subplots(len(KINDS), len(settings["dims"]), sharex=True, sharey=True, squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items(), strict=True):
        for axes, dim in zip(line, settings["dims"], strict=True):
            for projection in PROJECTIONS:
                rows = rows_with(result["norms"], dim=dim, kind=kind, matrix="scores", projection=projection)
                sure = [row for row in rows if row["effective_draws"] >= settings["short_draws"] / 4]
                draw_rows(axes, sure, "squared_norm", "ratio", label=projection, **line_style(projection))
            if dim**0.5 <= settings["norms"][-1]:
                axes.axvline(dim**0.5, color="black", linewidth=0.8, linestyle=":")
            axes.set_title(f"{title} features, d = {dim}")
            axes.set_ylim(0.02, 3)
            log_log(axes, settings["norms"])
        line[0].set_ylabel("error / error of iid rows")
    for axes in grid[-1]:
        axes.set_xlabel("|x|², dotted: of standard normal q and k")
    size = f"normal inputs, M = 4d, {settings['short_draws']} draws (bands: 95 %)"
    left_out = "left out: means that less than a quarter of the draws rule"
    title_and_legend(figure, f"What orthogonality gains, by norm: {size}; {left_out}")
    return figure


MseStudy.figures = {f"mse_{inputs}": partial(error_figure, inputs=inputs) for inputs in INPUTS}
MseStudy.figures |= {"mse_norms": norm_figure}
