"""Linear-chain MRFs with random features: how large the error of log Z is, beside attention, and when it is faster.

Embeddings are normal with mean |e|² = `squared_norm`, positive features orthogonal, M = `features` of them. Around one
point (states, features, length, norm) one of the four varies. The error of a chain is |log Ẑ - log Z| a transition,
with one draw for all transitions and with a draw for each. Attention with the same embeddings as queries and keys is
measured the same way: |log D̂ - log D| of its denominators, and ‖ô - o‖ / ‖o‖ of its outputs with normal values.

Time: the forward algorithm in log space and as scaled matrix-vector products, which is what to beat, against features
carried as messages, O(T|X|M), and as matrices, O(T|X|M²), of chains with scores for each node, so that every matrix is
another one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..bench.panels import Panel, draw, lines_of
from ..bench.timing import Competitor, Spread, interleave, threads
from ..features.projections import seeded_generator
from ..mrf import LinearChainMRF
from ..results import Table, number
from .base import Advance, Result, Study, mean_columns, rows_with

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
COLORS = ("#E69F00", "#D55E00", "#CC79A7", "#009E73")
EXACT_SCALED, EXACT_LOG = "exact, scaled products", "exact, log space"


class Point(NamedTuple):
    """Where an error is measured."""

    states: int
    features: int
    length: int
    squared_norm: float


@dataclass(frozen=True)
class MrfStudy(Study):
    """The point around which states, features, lengths and norms vary, and what is timed."""

    states: tuple[int, ...] = (4, 16, 64, 256, 1024)
    features: tuple[int, ...] = (16, 64, 256, 1024)
    lengths: tuple[int, ...] = (2, 4, 16, 64, 256, 1024)
    norms: tuple[float, ...] = (0.25, 0.5, 1, 2, 4)
    centre: tuple[int, int, int, float] = (64, 64, 64, 1)
    dim: int = 16
    draws: int = 20
    timed_states: tuple[int, ...] = (64, 256, 1024)
    timed_features: tuple[int, ...] = (16, 64)
    log_space_until: int = 1024
    repetitions: int = 3
    threads: int | None = None
    seed: int = 0

    name: ClassVar[str] = "mrf"
    full_settings: ClassVar[dict[str, Any]] = {
        "draws": 40,
        "timed_states": (64, 128, 256, 512, 1024, 2048, 4096),
        "timed_features": (16, 64, 256),
        "repetitions": 5,
    }

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
        times = []
        with threads(self.threads) as count, torch.inference_mode():
            for states in self.timed_states:
                advance(f"time, {states:,} states")
                times += self._times(states)
        return {"rows": rows, "times": times, "threads": count}

    def _embeddings(self, states: int, squared_norm: float, *seed: int) -> Tensor:
        generator = seeded_generator(self.seed, states, *seed)
        points = torch.randn(states, self.dim, generator=generator, dtype=torch.float64)
        return points * (squared_norm / self.dim) ** 0.5

    @torch.no_grad()
    def _errors(self, point: Point, number: int) -> dict[str, float]:
        """Of one draw, signed where that means something: log Z a transition, log denominators and outputs."""
        e = self._embeddings(point.states, point.squared_norm, number)
        chain = LinearChainMRF(e, length=point.length)
        exact = scaled_log_partition(chain)
        found = {}
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

    def _times(self, states: int) -> list[dict[str, Any]]:
        unary = torch.randn(self.centre[2], states, generator=seeded_generator(self.seed, states, 1))
        chain = LinearChainMRF(self._embeddings(states, self.centre[3]).float(), length=self.centre[2], unary=unary)
        competitors = {EXACT_SCALED: Competitor(partial(scaled_log_partition, chain))}
        if states <= self.log_space_until:
            competitors[EXACT_LOG] = Competitor(chain.log_partition)
        for M in self.timed_features:
            features = chain.random_features(M)
            for form, method in (("messages", "serial"), ("matrices", "matrices")):
                run = partial(chain.log_partition, features, method=method)  # type: ignore[arg-type]
                competitors[f"{form}, M = {M}"] = Competitor(run)
        rows = []
        for name, seconds in interleave(competitors, self.repetitions).items():
            spread = Spread.of([1000 * s for s in seconds])
            row = {"states": states, "name": name, "median_ms": spread.median}
            rows.append(row | {"low": spread.lower, "high": spread.upper})
        return rows

    @staticmethod
    def table(result: Result) -> Table:
        """Errors at both ends of what varies."""
        lines = []
        for varies, title in VARIES.items():
            rows = rows_with(result["rows"], varies=varies)
            for size in (rows[0][varies], rows[-1][varies]):
                errors = {row["kind"]: number(row["error"], 3) for row in rows if row[varies] == size}
                lines.append([f"{title} = {size:,}", *(errors[kind] for kind in KINDS)])
        return Table("Error", ["", *(label for label, _ in KINDS.values())], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Error against each of the four, and time by number of states."""
        settings = result["settings"]
        labelled = [row | {"kind": KINDS[row["kind"]][0]} for row in result["rows"]]
        panels = [
            Panel("", title, "error", lines_of(rows_with(labelled, varies=x), x, "error", "kind", dict(KINDS.values())))
            for x, title in VARIES.items()
        ]
        states, features, length, norm = settings["centre"]
        point = f"|X| = {states}, M = {features}, T = {length}, |e|² = {norm:g}"
        draws = f"n = {settings['dim']}, {settings['draws']} draws, bands: standard error"
        errors = f"Error of log Z a transition, and of attention, around {point} ({draws})"
        styles: dict[str, dict[str, Any]] = {EXACT_SCALED: {"color": "black"}}
        styles[EXACT_LOG] = {"color": "black", "linestyle": ":"}
        for M, color in zip(settings["timed_features"], COLORS, strict=False):
            styles[f"messages, M = {M}"] = {"color": color, "marker": "o"}
            styles[f"matrices, M = {M}"] = {"color": color, "marker": "s", "linestyle": "--"}
        lines = lines_of(result["times"], "states", "median_ms", "name", styles)
        where = f"{result['hardware']['cpu']}, threads: {result['threads']}"
        times = f"Time of log Z of a chain of {length} nodes, {where}"
        return {
            "mrf_error": draw(errors, [panels[:2], panels[2:]]),
            "mrf_time": draw(times, [[Panel("", VARIES["states"], "milliseconds", lines)]], 7),
        }


def scaled_log_partition(chain: LinearChainMRF) -> Tensor:
    """The exact log Z of one chain with shared embeddings, by products of a matrix and a vector scaled at every step.

    >>> chain = LinearChainMRF(torch.randn(5, 3), length=9, unary=torch.randn(9, 5))
    >>> torch.allclose(scaled_log_partition(chain), chain.log_partition())
    True
    """
    scores = chain.embeddings @ chain.embeddings.T
    offset = scores.max()
    kernel = torch.exp(scores - offset)
    weights = torch.exp(chain.unary[0]).expand(chain.num_nodes, -1)
    message, total = weights[0], (chain.num_nodes - 1) * offset
    for weight in weights[1:]:
        message = (kernel @ message) * weight
        size = message.max()
        message = message / size
        total = total + size.log()
    return message.sum().log() + total
