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

from ..bench.timing import Competitor, Spread, interleave, threads
from ..features.projections import seeded_generator
from ..mrf import LinearChainMRF
from ..results import Table, number
from ..results.plots import draw_rows, log_log, title_and_legend
from .base import Advance, Result, Study, mean_columns, rows_with

ONE, MANY = "one draw", "a draw a transition"
KINDS = {  # label, colour (Okabe and Ito), marker, line
    ONE: ("log Z, one draw for all transitions", "#0072B2", "s", "-"),
    MANY: ("log Z, a draw for each transition", "#D55E00", "D", "-"),
    "denominators": ("attention, log of denominators", "#666666", "o", "--"),
    "outputs": ("attention, outputs", "#CC79A7", "X", "--"),
}
VARIES = {
    "states": "|X|, states",
    "features": "M, features",
    "length": "T, nodes",
    "squared_norm": "|e|², squared norm",
}
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

    @property
    def points(self) -> list[tuple[str, Point]]:
        """What varies, and where."""
        centre = Point(*self.centre)
        found = [("states", centre._replace(states=n)) for n in self.states]
        found += [("features", centre._replace(features=n)) for n in self.features]
        found += [("length", centre._replace(length=n)) for n in self.lengths]
        return found + [("squared_norm", centre._replace(squared_norm=n)) for n in self.norms]

    def measure(self, advance: Advance) -> Result:
        rows = []
        for varies, point in self.points:
            samples = [self._errors(point, number) for number in range(self.draws)]
            for kind in KINDS:
                row = {"varies": varies, **point._asdict(), "kind": kind}
                rows.append(row | mean_columns("error", [abs(sample[kind]) for sample in samples]))
            advance(f"error by {varies.replace('_', ' ')}")
        with threads(self.threads) as count, torch.inference_mode():
            times = [row for states in self.timed_states for row in self._times(states, advance)]
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
        logs = torch.log(estimate.sum(-1) / scores.sum(-1))
        found["denominators"] = float(logs.abs().mean())
        v = torch.randn(point.states, self.dim, generator=seeded_generator(self.seed, number), dtype=torch.float64)
        out, approximate = (w / w.sum(-1, keepdim=True) @ v for w in (scores, estimate))
        found["outputs"] = float((approximate - out).norm() / out.norm())
        return found

    def _times(self, states: int, advance: Advance) -> list[dict[str, Any]]:
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
        doing = f"time, {states:,} states"
        seconds = interleave(competitors, self.repetitions, after_each=lambda name: advance(doing))
        spreads = {name: Spread.of([1000 * s for s in seconds[name]]) for name in competitors}
        return [
            {"states": states, "name": name, "median_ms": spread.median, "low": spread.lower, "high": spread.upper}
            for name, spread in spreads.items()
        ]

    @staticmethod
    def table(result: Result) -> Table:
        """Errors at both ends of what varies."""
        lines = []
        for varies, title in VARIES.items():
            rows = rows_with(result["rows"], varies=varies)
            for size in (rows[0][varies], rows[-1][varies]):
                errors = {row["kind"]: number(row["error"], 3) for row in rows if row[varies] == size}
                lines.append([f"{title} = {size:,}", *(errors[kind] for kind in KINDS)])
        return Table("Error", ["", *(label for label, *_ in KINDS.values())], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        return {"mrf_error": _error_figure(result), "mrf_time": _time_figure(result)}


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


def _error_figure(result: Result) -> Figure:
    """Error against each of the four."""
    settings = result["settings"]
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    for axes, (varies, title) in zip(figure.subplots(2, 2).flat, VARIES.items(), strict=True):
        for kind, (label, color, marker, line) in KINDS.items():
            style = {"color": color, "marker": marker, "linestyle": line, "markersize": 5, "label": label}
            draw_rows(axes, rows_with(result["rows"], varies=varies, kind=kind), varies, "error", **style)
        log_log(axes, [row[varies] for row in rows_with(result["rows"], varies=varies, kind=ONE)])
        axes.set(xlabel=title, ylabel="error")
    states, features, length, norm = settings["centre"]
    title_and_legend(
        figure,
        f"Error of log Z a transition, and of attention, around |X| = {states}, M = {features}, T = {length}, |e|² = "
        f"{norm:g} (n = {settings['dim']}, {settings['draws']} draws, bands: standard error)",
    )
    return figure


def _time_figure(result: Result) -> Figure:
    settings = result["settings"]
    colors = dict(zip(settings["timed_features"], ("#E69F00", "#D55E00", "#CC79A7", "#009E73"), strict=False))
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["name"] for row in result["times"]):
        if name.startswith("exact"):
            style = {"color": "black", "marker": "*", "linestyle": "-" if name == EXACT_SCALED else ":"}
        else:
            messages = name.startswith("messages")
            style = {"marker": "o" if messages else "s", "linestyle": "-" if messages else "--"}
            style["color"] = colors[int(name.rpartition(" ")[2])]
        draw_rows(axes, rows_with(result["times"], name=name), "states", "median_ms", label=name, **style)
    axes.set(xlabel="|X|, states", ylabel="milliseconds")
    log_log(axes, settings["timed_states"])
    where = f"{result['hardware']['cpu']}, threads: {result['threads']}"
    title_and_legend(figure, f"Time of log Z of a chain of {settings['centre'][2]} nodes, {where}")
    return figure
