"""Time of attention against length for each projection, and of the fast Walsh-Hadamard transform against a product.

A Hadamard projection of d rows can be applied in O(d log d): a sign flip and a transform for each block. As a matrix it
is applied like any other, in O(d²), by a product that processors are built for. Both are timed on the same rows, once
with one block and once with three; and the forward pass of "favor+" with each projection, beside exact softmax.

Competitors take turns and medians are compared (`bench.timing`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from ..bench.timing import Competitor, Spread, interleave, median_ratio, threads
from ..features.projections import seeded_generator
from ..mechanisms import build_mechanism
from ..ops import hadamard_matrix, softmax_attention, walsh_hadamard_transform
from ..results import SOFTMAX, Table, measured_crossover
from ..results.plots import draw_rows, line_style, log_log
from .base import Advance, Result, Study, rows_with

PROJECTIONS = ("iid", "orthogonal", "hadamard")
DENSE, ONE, THREE = "dense product", "fast transform, 1 block", "fast transform, 3 blocks"
TRANSFORMS = {DENSE: ("black", "*"), ONE: ("#E69F00", "^"), THREE: ("#D55E00", "D")}


@dataclass(frozen=True)
class TimeStudy(Study):
    """`lengths`: of attention; softmax only to `softmax_until`. `dims`: of the transform, of `tokens` rows."""

    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    softmax_until: int = 8192
    heads: int = 1
    head_dim: int = 64
    num_features: int = 64
    dims: tuple[int, ...] = tuple(2**i for i in range(4, 13))
    tokens: int = 256
    repetitions: int = 5
    threads: int | None = None
    seed: int = 0

    name: ClassVar[str] = "time"
    full_settings: ClassVar[dict[str, Any]] = {
        "lengths": (512, 1024, 2048, 4096, 8192, 16384, 32768),
        "softmax_until": 32768,
        "tokens": 1024,
        "repetitions": 7,
    }

    @torch.inference_mode()
    def measure(self, advance: Advance) -> Result:
        with threads(self.threads) as count:
            rows = self._attention(advance) + self._transform(advance)
        return {"rows": rows, "threads": count}

    def _attention(self, advance: Advance) -> list[dict[str, Any]]:
        shape = {"num_heads": self.heads, "head_dim": self.head_dim, "num_features": self.num_features}
        layers: dict[str, Callable[..., Any]] = {
            projection: build_mechanism("favor+", **shape, projection=projection, seed=self.seed).eval()
            for projection in PROJECTIONS
        }
        rows = []
        for length in self.lengths:
            generator = seeded_generator(self.seed, length)
            qkv = [torch.randn(1, self.heads, length, self.head_dim, generator=generator) for _ in range(3)]
            competitors = {name: Competitor(partial(layer, *qkv)) for name, layer in layers.items()}
            if length <= self.softmax_until:
                competitors[SOFTMAX] = Competitor(partial(softmax_attention, *qkv))
            rows += self._race("attention", length, competitors, "iid", advance)
        return rows

    def _transform(self, advance: Advance) -> list[dict[str, Any]]:
        rows = []
        for dim in self.dims:
            generator = seeded_generator(self.seed, dim)
            x = torch.randn(self.tokens, dim, generator=generator)
            signs = [torch.randint(0, 2, (dim,), generator=generator) * 2.0 - 1 for _ in range(3)]
            matrix = hadamard_matrix(dim)
            competitors = {
                DENSE: Competitor(partial(torch.matmul, x, matrix)),
                ONE: Competitor(partial(rotate, x, signs[:1])),
                THREE: Competitor(partial(rotate, x, signs)),
            }
            rows += self._race("transform", dim, competitors, DENSE, advance)
        return rows

    def _race(
        self, what: str, size: int, competitors: dict[str, Competitor], baseline: str, advance: Advance
    ) -> list[dict[str, Any]]:
        """A row each competitor: milliseconds, and the median ratio to the baseline within repetitions."""
        doing = f"attention, L = {size:,}" if what == "attention" else f"transform, d = {size:,}"
        seconds = interleave(competitors, self.repetitions, after_each=lambda name: advance(doing))
        rows = []
        for name in competitors:
            spread = Spread.of([1000 * s for s in seconds[name]])
            row = {"what": what, "size": size, "name": name, "median_ms": spread.median}
            row |= {"low": spread.lower, "high": spread.upper, "baseline": baseline}
            rows.append(row | {"over_baseline": round(median_ratio(seconds[name], seconds[baseline]), 4)})
        return rows

    @staticmethod
    def table(result: Result) -> Table:
        """Milliseconds at the largest sizes, and the size from which on each stays faster than its baseline."""
        lines = []
        for what in ("attention", "transform"):
            rows = rows_with(result["rows"], what=what)
            for name in dict.fromkeys(row["name"] for row in rows):
                own = rows_with(rows, name=name)
                first = measured_crossover([r["size"] for r in own], [1 / r["over_baseline"] for r in own])[0]
                last, faster = own[-1], "–" if name == own[0]["baseline"] else f"{first:,}" if first else "none"
                lines.append([f"{what}, {name}", f"{last['size']:,}", f"{last['median_ms']:.3g}", faster])
        return Table("", ["", "largest size", "ms", "faster than the first row from"], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        return {"time": _figure(result)}


def rotate(x: torch.Tensor, signs: list[torch.Tensor]) -> torch.Tensor:
    """(H D_k)…(H D_1) applied to rows by the fast transform."""
    for sign in signs:
        x = walsh_hadamard_transform(x * sign)
    return x


def _figure(result: Result) -> Figure:
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles: dict[str, dict[str, Any]] = {name: line_style(name) for name in (SOFTMAX, *PROJECTIONS)}
    styles |= {name: {"color": color, "marker": marker} for name, (color, marker) in TRANSFORMS.items()}
    for axes, what in ((left, "attention"), (right, "transform")):
        rows = rows_with(result["rows"], what=what)
        for name in dict.fromkeys(row["name"] for row in rows):
            draw_rows(axes, rows_with(rows, name=name), "size", "median_ms", label=name, **styles[name])
        log_log(axes, sorted({row["size"] for row in rows}))
        axes.legend(frameon=False)
    settings, hardware = result["settings"], result["hardware"]
    shape = f"heads: {settings['heads']}, of {settings['head_dim']}; {settings['num_features']} features"
    left.set(title=f"Attention ({shape})", xlabel="length (tokens)", ylabel="milliseconds")
    right.set(title=f"Hadamard projection of {settings['tokens']:,} rows", xlabel="d", ylabel="milliseconds")
    right.tick_params(axis="x", rotation=40)
    figure.suptitle(f"Medians and quartiles, {hardware['cpu']}, threads: {result['threads']}")
    return figure
