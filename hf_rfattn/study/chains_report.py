"""Plots, tables and conclusions of the study "mrf", made from its document alone."""

import math
from typing import Any

from matplotlib.figure import Figure

from .base import Result
from .plotting import log_ticks
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


def _series(result: Result, varies: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if (row["varies"], row["kind"]) == (varies, kind)]


def tables(result: Result) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, columns and lines."""
    found = []
    for varies, title in VARIES.items():
        values = [row[varies] for row in _series(result, varies, ONE)]
        lines = [[kind, *(f"{row['error']:.4f}" for row in _series(result, varies, kind))] for kind in KINDS]
        found.append(
            (
                f"Error by {title} (draws: of log Z a transition; others: of attention)",
                ["", *(f"{value:,}" for value in values)],
                lines,
            )
        )
    states = sorted({row["states"] for row in result["times"]})
    times = {(row["name"], row["states"]): row["median_ms"] for row in result["times"]}
    names = dict.fromkeys(row["name"] for row in result["times"])
    lines = [[n, *(f"{times[n, s]:.3g}" if (n, s) in times else "–" for s in states)] for n in names]
    length = result["settings"]["centre"][2]
    found.append((f"Milliseconds of log Z by |X|, T = {length}", ["", *(f"{s:,}" for s in states)], lines))
    return found


def conclusions(result: Result) -> list[str]:
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
    centre = result["settings"]["centre"]
    names = ("states", "features", "length", "squared_norm")
    rows = [row for row in result["rows"] if row["kind"] == kind and [row[name] for name in names] == list(centre)]
    return rows[0]["error"]


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
            rows = _series(result, varies, kind)
            x = [row[varies] for row in rows]
            style = {"color": color, "marker": marker, "linestyle": line, "markersize": 5}
            axes.plot(x, [row["error"] for row in rows], label=label, **style)
            low, high = [row["low"] for row in rows], [row["high"] for row in rows]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        log_ticks(axes, x)
        axes.set(xlabel=title, ylabel="error")
    states, features, length, norm = settings["centre"]
    figure.suptitle(
        f"Error of log Z a transition, and of attention, around |X| = {states}, M = {features}, T = {length}, |e|² = "
        f"{norm:g} (n = {settings['dim']}, {settings['draws']} draws, bands: 95 %)"
    )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def time_figure(result: Result) -> Figure:
    """Measured, and as multiply-adds are counted."""
    settings = result["settings"]
    colors = dict(zip(settings["timed_features"], ("#E69F00", "#D55E00", "#CC79A7", "#009E73"), strict=False))
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["name"] for row in result["times"]))
    for name in names:
        rows = [row for row in result["times"] if row["name"] == name]
        x = [row["states"] for row in rows]
        if name.startswith("exact"):
            style = {"color": "black", "marker": "*", "linestyle": "-" if name == EXACT_SCALED else ":"}
        else:
            M = int(name.rpartition(" ")[2])
            messages = name.startswith("messages")
            style = {"color": colors[M], "marker": "o" if messages else "s", "linestyle": "-" if messages else "--"}
        left.plot(x, [row["median_ms"] for row in rows], label=name, **style)
        left.fill_between(
            x,
            [row["low"] for row in rows],
            [row["high"] for row in rows],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
        if name != EXACT_LOG:
            right.plot(x, [row["multiply_adds"] for row in rows], **style)
    left.set(title="measured", xlabel="|X|, states", ylabel="milliseconds")
    right.set(title="counted", xlabel="|X|, states", ylabel="multiply-adds")
    for axes in (left, right):
        log_ticks(axes, settings["timed_states"])
    figure.suptitle(
        f"log Z of a chain of {settings['centre'][2]} nodes, {result['hardware']['cpu']}, threads: {result['threads']}"
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
