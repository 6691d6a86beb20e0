"""How plots of this project look: one colour and marker a mechanism, everywhere the same."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

SOFTMAX = "softmax"
BASELINE = "average"  # no attention at all

STYLES = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    SOFTMAX: ("black", "*"),
    "favor+": ("#0072B2", "o"),
    "rff": ("#E69F00", "s"),
    "linear": ("#CC79A7", "D"),
    "hedgehog": ("#009E73", "^"),
    "fmm": ("#D55E00", "P"),
    "band": ("#56B4E9", "v"),
    BASELINE: ("#666666", "x"),
}


def line_style(name: str) -> dict[str, Any]:
    """Keywords for `Axes.plot`."""
    color, marker = STYLES.get(name, ("#999999", "."))
    return {"color": color, "marker": marker, "linestyle": "--" if name == BASELINE else "-"}


def log_log(axes: Axes, lengths: Sequence[int]) -> None:
    """Both axes logarithmic, a tick at every measured length, plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)
