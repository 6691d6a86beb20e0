"""Linear-chain MRFs with random features: how large the error of log Z is, beside attention, and when it is faster.

Embeddings are normal with mean |e|² = `squared_norm`, positive features orthogonal, M = `features` of them. Around one
point (states, features, length, norm) one of the four varies. The error of a chain is |log Ẑ - log Z| a transition,
with one draw for all transitions and with a draw for each. Attention with the same embeddings as queries and keys is
measured the same way: |log D̂ - log D| of its denominators, and ‖ô - o‖ / ‖o‖ of its outputs with normal values.

Time: the forward algorithm in log space and as scaled matrix-vector products, which is what to beat, against features
carried as messages, O(T|X|M), and as matrices, O(T|X|M²), of chains with scores for each node, so that every matrix is
another one. Signed features: how often Z comes out negative.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..bench.timing import Competitor, Spread, interleave, threads
from ..features import FourierFeatures
from ..features.projections import seeded_generator
from ..mrf import LinearChainMRF
from ..results import rounded
from ..results.plots import draw_rows, log_log, title_and_legend
from .base import Advance, Result, Study, rows_with
from .intervals import mean_interval
from .times import first_below

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
SIGNED_LENGTHS = (2, 3, 8)


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
                interval = mean_interval([abs(sample[kind]) for sample in samples])
                row = {"varies": varies, **point._asdict(), "kind": kind, "error": interval.mean}
                row |= {"low": interval.low, "high": interval.high}
                mean = sum(sample[kind] for sample in samples) / len(samples)
                rows.append(row | {"mean": rounded(mean)})
            advance(f"error by {varies.replace('_', ' ')}")
        signed = [self._signed(norm, advance) for norm in self.norms]
        with threads(self.threads) as count, torch.inference_mode():
            times = [row for states in self.timed_states for row in self._times(states, advance)]
        return {"rows": rows, "signed": signed, "times": times, "threads": count}

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

    @torch.no_grad()
    def _signed(self, norm: float, advance: Advance) -> dict[str, Any]:
        """Share of draws of sine and cosine features whose Z is negative; embeddings differ from node to node."""
        row: dict[str, Any] = {"squared_norm": norm, "features": self.centre[1], "states": self.centre[0]}
        for length in SIGNED_LENGTHS:
            negative = 0
            for number in range(self.draws):
                nodes = [self._embeddings(self.centre[0], norm, number, node) for node in range(length)]
                features = FourierFeatures(1, self.centre[1], self.dim, (self.seed, number), normalize_qk=False)
                sign, _ = LinearChainMRF(torch.stack(nodes)).log_partition(features, return_sign=True)
                negative += int(sign < 0)
            row[f"negative_T{length}"] = round(negative / self.draws, 4)
        advance("signed features")
        return row

    def _competitors(self, states: int) -> list[str]:
        """Names of what is timed for so many states."""
        exact = [EXACT_SCALED, EXACT_LOG] if states <= self.log_space_until else [EXACT_SCALED]
        return exact + [f"{form}, M = {M}" for M in self.timed_features for form in ("messages", "matrices")]

    def _run(self, name: str, chain: LinearChainMRF) -> Callable[[], Tensor]:
        if name == EXACT_SCALED:
            return partial(scaled_log_partition, chain)
        if name == EXACT_LOG:
            return chain.log_partition
        form, M = name.split(", M = ")
        features = chain.random_features(int(M))
        return partial(chain.log_partition, features, method="serial" if form == "messages" else "matrices")

    def _times(self, states: int, advance: Advance) -> list[dict[str, Any]]:
        unary = torch.randn(self.centre[2], states, generator=seeded_generator(self.seed, states, 1))
        chain = LinearChainMRF(self._embeddings(states, self.centre[3]).float(), length=self.centre[2], unary=unary)
        competitors = {name: Competitor(self._run(name, chain)) for name in self._competitors(states)}
        doing = f"time, {states:,} states"
        seconds = interleave(competitors, self.repetitions, after_each=lambda name: advance(doing))
        rows = []
        for name in competitors:
            spread = Spread.of([1000 * s for s in seconds[name]])
            row = {
                "states": states,
                "name": name,
                "median_ms": spread.median,
                "low": spread.lower,
                "high": spread.upper,
            }
            rows.append(row | {"multiply_adds": multiply_adds(name, states, self.centre[2])})
        return rows

    @staticmethod
    def conclusions(result: Result) -> list[str]:
        return _conclusions(result)


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


def multiply_adds(name: str, states: int, length: int) -> int:
    """Leading counts a chain: T|X|², 2T|X|M and T|X|M²."""
    if not name.startswith(("messages", "matrices")):
        return length * states**2
    M = int(name.rpartition(" ")[2])
    return length * states * (2 * M if name.startswith("messages") else M**2)


def _series(result: Result, varies: str, kind: str) -> list[dict[str, Any]]:
    return rows_with(result["rows"], varies=varies, kind=kind)


def _conclusions(result: Result) -> list[str]:
    settings = result["settings"]
    states, features, length, norm = settings["centre"]

    def factor(varies: str, kind: str) -> float:
        rows = _series(result, varies, kind)
        return rows[-1]["error"] / rows[0]["error"]

    def ends(varies: str) -> str:
        rows = _series(result, varies, ONE)
        return f"{rows[0][varies]:,} to {rows[-1][varies]:,}"

    def both(varies: str) -> str:
        factors = [factor(varies, kind) for kind in (ONE, MANY)]
        one, many = (f"{value:.2f}" if value < 10 else f"{value:,.0f}" for value in factors)
        return f"by {one} and {many} as {varies_names[varies]} goes from {ends(varies)}"

    def tighter(kind: str) -> str:
        """At which norms a transition errs less than a denominator."""
        pairs = zip(*(_series(result, "squared_norm", name) for name in (kind, "denominators")), strict=True)
        norms = [f"{chain['squared_norm']:g}" for chain, attention in pairs if chain["error"] < attention["error"]]
        return ", ".join(norms) or "none of them"

    varies_names = {"states": "|X|", "length": "T", "squared_norm": "|e|²"}
    slope = math.log(factor("features", ONE)) / math.log(settings["features"][-1] / settings["features"][0])
    one, many, denominators, outputs = (_at_centre(result, kind) for kind in KINDS)
    last = settings["lengths"][-1]
    whole = [_series(result, "length", kind)[-1]["error"] * (last - 1) for kind in (ONE, MANY)]
    calm, worst = result["signed"][0], max(row["negative_T3"] for row in result["signed"])
    return [
        f"Around |X| = {states}, M = {features}, T = {length}, |e|² = {norm:g} the error of log Z a transition is "
        f"{one:.3f} with one draw for all transitions and {many:.3f} with a draw for each; attention with the same "
        f"embeddings and M errs by {denominators:.3f} in the logarithm of a denominator and by {outputs:.3f} in its "
        "outputs.",
        f"The error of log Z falls as M to the power {slope:.2f} ({ends('features')}, one draw), and is multiplied, "
        f"with one draw and with a draw each, {both('states')}, {both('length')}, {both('squared_norm')}.",
        f"A transition is tighter than a denominator of attention at |e|² = {tighter(ONE)} with one draw and at "
        f"{tighter(MANY)} with a draw each, of {', '.join(f'{n:g}' for n in settings['norms'])}; elsewhere looser.",
        f"One draw errs the same way at every transition: at T = {last:,} log Z is off by {whole[0]:.1f} on average, "
        f"with a draw for each transition by {whole[1]:.1f}.",
        _crossovers(result),
        f"Sine and cosine features made Z of three nodes negative in {100 * calm['negative_T3']:.0f} % of draws at "
        f"|e|² = {calm['squared_norm']:g} and in up to {100 * worst:.0f} % at larger norms (M = {calm['features']}, "
        "embeddings for each node); positive features cannot.",
    ]


def _at_centre(result: Result, kind: str) -> float:
    centre = Point(*result["settings"]["centre"])
    return rows_with(result["rows"], kind=kind, **centre._asdict())[0]["error"]


def _crossovers(result: Result) -> str:
    settings = result["settings"]
    times = {(row["name"], row["states"]): row["median_ms"] for row in result["times"]}
    parts = []
    for form, count in (("messages", lambda M: 2 * M), ("matrices", lambda M: M**2)):
        for M in settings["timed_features"]:
            name = f"{form}, M = {M}"
            ratios = [(s, times[name, s] / times[EXACT_SCALED, s]) for s in settings["timed_states"]]
            first = first_below(ratios)
            measured = f"from {first:,}" if first else f"not up to {settings['timed_states'][-1]:,}"
            parts.append(f"{name} {measured} (counted: above {count(M):,})")
    return (
        f"States from which features are faster than the exact forward algorithm as scaled products, T = "
        f"{settings['centre'][2]}: {'; '.join(parts)}."
    )


def error_figure(result: Result) -> Figure:
    """Error against each of the four."""
    settings = result["settings"]
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    for axes, (varies, title) in zip(figure.subplots(2, 2).flat, VARIES.items(), strict=True):
        for kind, (label, color, marker, line) in KINDS.items():
            style = {"color": color, "marker": marker, "linestyle": line, "markersize": 5, "label": label}
            draw_rows(axes, _series(result, varies, kind), varies, "error", **style)
        log_log(axes, [row[varies] for row in _series(result, varies, ONE)])
        axes.set(xlabel=title, ylabel="error")
    states, features, length, norm = settings["centre"]
    title_and_legend(
        figure,
        f"Error of log Z a transition, and of attention, around |X| = {states}, M = {features}, T = {length}, |e|² = "
        f"{norm:g} (n = {settings['dim']}, {settings['draws']} draws, bands: 95 %)",
    )
    return figure


def time_figure(result: Result) -> Figure:
    """Measured, and as multiply-adds are counted."""
    settings = result["settings"]
    colors = dict(zip(settings["timed_features"], ("#E69F00", "#D55E00", "#CC79A7", "#009E73"), strict=False))
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["name"] for row in result["times"]))
    for name in names:
        rows = rows_with(result["times"], name=name)
        if name.startswith("exact"):
            style = {"color": "black", "marker": "*", "linestyle": "-" if name == EXACT_SCALED else ":"}
        else:
            M = int(name.rpartition(" ")[2])
            messages = name.startswith("messages")
            style = {"color": colors[M], "marker": "o" if messages else "s", "linestyle": "-" if messages else "--"}
        draw_rows(left, rows, "states", "median_ms", label=name, **style)
        if name != EXACT_LOG:
            right.plot([row["states"] for row in rows], [row["multiply_adds"] for row in rows], **style)
    left.set(title="measured", xlabel="|X|, states", ylabel="milliseconds")
    right.set(title="counted", xlabel="|X|, states", ylabel="multiply-adds")
    for axes in (left, right):
        log_log(axes, settings["timed_states"])
    where = f"{result['hardware']['cpu']}, threads: {result['threads']}"
    title_and_legend(figure, f"log Z of a chain of {settings['centre'][2]} nodes, {where}")
    return figure


MrfStudy.figures = {"mrf_error": error_figure, "mrf_time": time_figure}
