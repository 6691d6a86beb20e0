"""Time of the fast Walsh-Hadamard transform against a product with the same matrix.

A Hadamard projection of d rows can be applied in O(d log d): a sign flip and a transform for each block. As a matrix it
is applied like any other, in O(d²), by a product that processors are built for. Both are timed on the same rows, once
with one block and once with three.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from ..bench.panels import Panel, draw, lines_of
from ..bench.timing import Competitor, Spread, interleave, median_ratio, threads
from ..features.projections import seeded_generator
from ..ops import hadamard_matrix, walsh_hadamard_transform
from ..results import Table, measured_crossover
from .base import Advance, Result, Study, rows_with

DENSE, ONE, THREE = "dense product", "fast transform, 1 block", "fast transform, 3 blocks"
STYLES = {DENSE: {"color": "black"}, ONE: {"color": "#E69F00"}, THREE: {"color": "#D55E00"}}


@dataclass(frozen=True)
class TimeStudy(Study):
    """`dims`: of the transform, of `tokens` rows."""

    dims: tuple[int, ...] = tuple(2**i for i in range(4, 13))
    tokens: int = 256
    repetitions: int = 5
    threads: int | None = None
    seed: int = 0

    name: ClassVar[str] = "time"
    full_settings: ClassVar[dict[str, Any]] = {"tokens": 1024, "repetitions": 7}

    @torch.inference_mode()
    def measure(self, advance: Advance) -> Result:
        rows = []
        with threads(self.threads) as count:
            for dim in self.dims:
                advance(f"d = {dim:,}")
                generator = seeded_generator(self.seed, dim)
                x = torch.randn(self.tokens, dim, generator=generator)
                signs = [torch.randint(0, 2, (dim,), generator=generator) * 2.0 - 1 for _ in range(3)]
                competitors = {
                    DENSE: Competitor(partial(torch.matmul, x, hadamard_matrix(dim))),
                    ONE: Competitor(partial(rotate, x, signs[:1])),
                    THREE: Competitor(partial(rotate, x, signs)),
                }
                seconds = interleave(competitors, self.repetitions)
                for name, own in seconds.items():
                    spread = Spread.of([1000 * s for s in own])
                    row = {"what": "transform", "size": dim, "name": name, "median_ms": spread.median}
                    row |= {"low": spread.lower, "high": spread.upper}
                    rows.append(row | {"over_baseline": round(median_ratio(own, seconds[DENSE]), 4)})
        return {"rows": rows, "threads": count}

    @staticmethod
    def table(result: Result) -> Table:
        """Milliseconds at the largest size, and the size from which on the transform stays faster."""
        lines = []
        for name in STYLES:
            own = rows_with(result["rows"], what="transform", name=name)  # older documents hold other rows
            first = measured_crossover([r["size"] for r in own], [1 / r["over_baseline"] for r in own])[0]
            faster = "–" if name == DENSE else f"{first:,}" if first else "none"
            lines.append([name, f"{own[-1]['size']:,}", f"{own[-1]['median_ms']:.3g}", faster])
        return Table("", ["", "largest size", "ms", "faster than the product from"], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        lines = lines_of(rows_with(result["rows"], what="transform"), "size", "median_ms", "name", STYLES)
        title = f"Hadamard projection of {result['settings']['tokens']:,} rows, medians and quartiles"
        where = f"{result['hardware']['cpu']}, threads: {result['threads']}"
        return {"time": draw(f"{title}, {where}", [[Panel("", "d", "milliseconds", lines)]], 8)}


def rotate(x: torch.Tensor, signs: list[torch.Tensor]) -> torch.Tensor:
    """(H D_k)…(H D_1) applied to rows by the fast transform."""
    for sign in signs:
        x = walsh_hadamard_transform(x * sign)
    return x
