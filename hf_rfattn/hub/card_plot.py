"""The picture in a card: accuracy beside softmax and the controls, time and memory by length. From documents alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..mechanisms.naming import attention_label, mechanism_names_in
from ..results import SOFTMAX, SpeedResult, number
from .findings import OTHER_SEED, THIS, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_results(comparisons: Sequence[Comparison], timings: Sequence[SpeedResult]) -> "Figure":
    """A panel for each task's main metric, one for time and one for memory of each speed result."""
    from matplotlib.figure import Figure

    with_memory = [speed for speed in timings if any(t.patched_peak_bytes for t in speed.lengths)]
    panels = len(comparisons) + len(timings) + len(with_memory)
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = iter(figure.subplots(1, panels, squeeze=False)[0])
    for comparison in comparisons:
        _bars(next(axes), comparison)
    for speed in timings:
        _lines(next(axes), speed, "seconds", "Seconds a pass", 1)
        if speed in with_memory:
            _lines(next(axes), speed, "peak_bytes", "Peak memory (MiB)", 2**20)
    return figure


def _bars(axes: "Axes", comparison: Comparison) -> None:
    from ..results.plots import line_style

    own = comparison.own
    metric = own.main_metric
    rows = [row for row in comparison.rows if metric in row.result.metrics][::-1]
    names = [(mechanism_names_in(row.result.attention) or [SOFTMAX])[0] for row in rows]
    values = [row.result.metrics[metric].value for row in rows]
    bars = axes.barh(range(len(rows)), values, color=[line_style(name)["color"] for name in names])
    for bar, row in zip(bars, rows, strict=True):
        bar.set_alpha(1.0 if row.role in (THIS, OTHER_SEED) else 0.55)
    axes.bar_label(bars, [number(value) for value in values], padding=3)
    labels = [f"{_shortened(attention_label(row.result.attention))}\n{row.role}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.margins(x=0.2)
    axes.set(title=f"{own.task}: {metric} ({own.metrics[metric].n:,} examples)", xlabel=metric)


def _shortened(label: str) -> str:
    return label if len(label) <= 40 else label[:39] + "…"


def _lines(axes: "Axes", speed: SpeedResult, field: str, title: str, unit: float) -> None:
    from ..results.plots import line_style, log_log

    own = mechanism_names_in(speed.attention)[0]
    for name, who in ((SOFTMAX, "softmax"), (own, "patched")):
        points = [(t.length, getattr(t, f"{who}_{field}")) for t in speed.lengths]
        measured = [(length, value / unit) for length, value in points if value]
        axes.plot([x for x, _ in measured], [y for _, y in measured], label=name, **line_style(name))
    log_log(axes, [t.length for t in speed.lengths])
    axes.xaxis.set_minor_formatter("")
    axes.set(title=f"{title}, batch {speed.batch}, {speed.dtype}\n{speed.machine}", xlabel="tokens")
    axes.legend(frameon=False)
