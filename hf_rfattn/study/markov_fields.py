"""Error of log Z of linear-chain MRFs with random features, compared with the error of attention.

Embeddings are normal with mean |e|² = `squared_norm`; there are M = `features` orthogonal positive features. One of the
four parameters (states, features, length, norm) varies at a time. The error of a chain is |log Ẑ - log Z| per
transition, with one draw for all transitions and with one draw per transition. Attention with the same embeddings as
queries and keys is measured by |log D̂ - log D| of its denominators and ‖ô - o‖ / ‖o‖ of its outputs with normal values.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..features.projections import seeded_generator
from ..mrf import LinearChainMRF
from ..results.plots import Panel, draw, lines_of
from ..results.report import Table, number
from . import Advance, Result, Study, mean_columns, rows_with

ONE, MANY = "one draw", "a draw a transition"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # label and style; colours of Okabe and Ito
    ONE: ("log Z, one draw for all transitions", {"color": "#0072B2", "marker": "s"}),
    MANY: ("log Z, a draw for each transition", {"color": "#D55E00", "marker": "D"}),
    "denominators": ("attention, log of denominators", {"color": "#666666", "marker": "o", "linestyle": "--"}),
    "outputs": ("attention, outputs", {"color": "#CC79A7", "marker": "X", "linestyle": "--"}),
}
VARIES = {
    "states": "|X|, states",
    "features": "M, features",
    "length": "T, nodes",
    "squared_norm": "|e|², squared norm",
}


class Point(NamedTuple):
    """Parameters at which an error is measured."""

    states: int
    features: int
    length: int
    squared_norm: float


@dataclass(frozen=True)
class MrfStudy(Study):
    """Values of states, features, lengths and norms, and the `centre` from which one of them varies at a time."""

    states: tuple[int, ...] = (4, 16, 64, 256, 1024)
    features: tuple[int, ...] = (16, 64, 256, 1024)
    lengths: tuple[int, ...] = (2, 4, 16, 64, 256, 1024)
    norms: tuple[float, ...] = (0.25, 0.5, 1, 2, 4)
    centre: tuple[int, int, int, float] = (64, 64, 64, 1)
    dim: int = 16
    draws: int = 20
    seed: int = 0

    name: ClassVar[str] = "mrf"
    full_settings: ClassVar[dict[str, Any]] = {"draws": 40}

    def measure(self, advance: Advance) -> Result:
        rows, centre = [], Point(*self.centre)
        sizes: dict[str, Any] = dict(zip(VARIES, (self.states, self.features, self.lengths, self.norms), strict=True))
        for varies, values in sizes.items():
            for point in (centre._replace(**{varies: value}) for value in values):
                advance(f"error by {varies.replace('_', ' ')}")
                samples = [self._errors(point, number) for number in range(self.draws)]
                for kind in KINDS:
                    row = {"varies": varies, **point._asdict(), "kind": kind}
                    rows.append(row | mean_columns("error", [abs(sample[kind]) for sample in samples]))
        return {"rows": rows}

    def _embeddings(self, states: int, squared_norm: float, *seed: int) -> Tensor:
        generator = seeded_generator(self.seed, states, *seed)
        points = torch.randn(states, self.dim, generator=generator, dtype=torch.float64)
        return points * (squared_norm / self.dim) ** 0.5

    @torch.no_grad()
    def _errors(self, point: Point, number: int) -> dict[str, float]:
        """Errors of one draw: log Z per transition (signed), log denominators and outputs."""
        e = self._embeddings(point.states, point.squared_norm, number)
        chain = LinearChainMRF(e, length=point.length)
        exact, found = chain.log_partition(), {}
        for kind, independent in ((ONE, False), (MANY, True)):
            features = chain.random_features(point.features, independent=independent, seed=number)
            found[kind] = float(chain.log_partition(features) - exact) / (point.length - 1)
        phi_map = chain.random_features(point.features, seed=number)
        phi = phi_map("query").exactly(e[None, None]).dense()[0, 0]
        scores, estimate = torch.exp(e @ e.T), phi @ phi.T
        found["denominators"] = float(torch.log(estimate.sum(-1) / scores.sum(-1)).abs().mean())
        v = torch.randn(point.states, self.dim, generator=seeded_generator(self.seed, number), dtype=torch.float64)
        out, approximate = (w / w.sum(-1, keepdim=True) @ v for w in (scores, estimate))
        found["outputs"] = float((approximate - out).norm() / out.norm())
        return found

    @staticmethod
    def table(result: Result) -> Table:
        """Errors at the smallest and largest value of each parameter."""
        lines = []
        for varies, title in VARIES.items():
            rows = rows_with(result["rows"], varies=varies)
            for size in (rows[0][varies], rows[-1][varies]):
                errors = {row["kind"]: number(row["error"], 3) for row in rows if row[varies] == size}
                lines.append([f"{title} = {size:,}", *(errors[kind] for kind in KINDS)])
        return Table("Error", ["", *(label for label, _ in KINDS.values())], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Error against each of the four parameters."""
        settings = result["settings"]
        labelled = [row | {"kind": KINDS[row["kind"]][0]} for row in result["rows"]]
        panels = [
            Panel("", title, "error", lines_of(rows_with(labelled, varies=x), x, "error", "kind", dict(KINDS.values())))
            for x, title in VARIES.items()
        ]
        states, features, length, norm = settings["centre"]
        point = f"|X| = {states}, M = {features}, T = {length}, |e|² = {norm:g}"
        draws = f"n = {settings['dim']}, {settings['draws']} draws, bands: standard error"
        title = f"Error of log Z per transition, and of attention, around {point} ({draws})"
        return {"mrf_error": draw(title, [panels[:2], panels[2:]])}
