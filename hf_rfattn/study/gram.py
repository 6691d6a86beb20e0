"""Error of random Fourier approximations of Gram matrices by number of features, for shift-invariant kernels.

K(x - y) ≈ φ(x)ᵀφ(y) with error ‖φφᵀ - K‖ / ‖K‖ (Frobenius), which decreases as M^(-1/2) for independent features. The
study covers both real forms of Rahimi and Recht (2007), cosines with a random phase and pairs of sine and cosine, and
three projections.

The frequencies of the Gaussian kernel are normal, so orthogonal or Hadamard rows can replace them. The frequencies of
the Laplace and Cauchy kernels have independent coordinates and are not isotropic, so their rows cannot be orthogonal.
Here each coordinate of a normal row g, structured or not, is mapped to F⁻¹(Φ(g)), where F is the distribution of the
kernel's frequencies (a Gaussian copula). This is exact for iid and orthogonal rows, which are normal, and rows stay
dependent; the coordinates of a Hadamard row are only approximately normal.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..features import KERNELS, FourierFeatures, kernel_matrix
from ..features.projections import seeded_generator
from ..results.plots import Panel, draw, lines_of
from ..results.report import Table, number
from . import Advance, Result, Study, mean_columns, rows_with
from .mse import draw_rows

FORMS = {"sincos": "sine and cosine", "cos": "cosine with a phase"}
PROJECTIONS = ("iid", "orthogonal", "hadamard")


def frequencies(kernel: str, normal: Tensor) -> Tensor:
    """Map normal numbers to frequencies of a kernel, by coordinate.

    >>> frequencies("laplace", torch.tensor([0.0, 0.6744898]))  # the median of |ω| is that of a Cauchy, 1
    tensor([0.0000, 1.0000])
    """
    if kernel == "laplace":  # its frequencies are Cauchy distributed
        return torch.tan(math.pi / 2 * torch.erf(normal / math.sqrt(2)))
    if kernel == "cauchy":  # its frequencies are Laplace distributed
        return -normal.sign() * torch.log(torch.erfc(normal.abs() / math.sqrt(2)))
    return normal


def smooth_points(length: int, dim: int, generator: torch.Generator) -> Tensor:
    """Points `[L, dim]` along a closed curve of a few harmonics, with mean squared distance 2."""
    t = torch.arange(length, dtype=torch.float64) / length * 2 * math.pi
    points = torch.zeros(length, dim, dtype=torch.float64)
    for harmonic in (1, 2, 5):
        amplitude, phase = (torch.rand(dim, generator=generator, dtype=torch.float64) for _ in range(2))
        points += amplitude * torch.cos(harmonic * t[:, None] + 2 * math.pi * phase) / harmonic**0.5
    return points / points.std(0) / dim**0.5


@dataclass(frozen=True)
class GramStudy(Study):
    """`features`: numbers of features. `draws`: number of projections. `length`: number of points."""

    features: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    draws: int = 10
    length: int = 64
    dim: int = 8
    seed: int = 0

    name: ClassVar[str] = "gram"
    full_settings: ClassVar[dict[str, Any]] = {"draws": 40, "features": tuple(2**i for i in range(3, 13))}

    def measure(self, advance: Advance) -> Result:
        points = smooth_points(self.length, self.dim, seeded_generator(self.seed))
        rows = []
        for kernel, form, projection in itertools.product(KERNELS, FORMS, PROJECTIONS):
            advance(f"{kernel}, {FORMS[form]}, {projection}")
            exact = kernel_matrix(kernel, points, points)
            for M in self.features:
                generator = seeded_generator(self.seed, list(FORMS).index(form), PROJECTIONS.index(projection), M)
                phi = self._features(kernel, form, projection, M, points, generator)
                errors = (phi @ phi.mT - exact).norm(dim=(-2, -1)) / exact.norm()
                row = {"kernel": kernel, "form": form, "projection": projection, "features": M}
                rows.append(row | mean_columns("error", errors.tolist()))
        return {"rows": rows}

    def _features(
        self, kernel: str, form: str, projection: str, M: int, points: Tensor, generator: torch.Generator
    ) -> Tensor:
        """φ of every draw, `[draws, L, M]`."""
        options: dict[str, Any] = {"kernel": kernel, "form": form, "normalize_qk": False, "projection": "iid"}
        phi_map = FourierFeatures(self.draws, M, self.dim, (self.seed, M), **options).double()
        normal = draw_rows(projection, phi_map.projection.shape, generator)
        phi_map.projection.copy_(frequencies(kernel, normal))
        phi: Any = phi_map("query").exactly(points.expand(1, self.draws, -1, -1)).factor  # without exp(|x|²/2)
        return phi[0]

    @staticmethod
    def table(result: Result) -> Table:
        """Errors with the largest number of features."""
        most = result["settings"]["features"][-1]
        rows = rows_with(result["rows"], features=most)
        cells = {(row["kernel"], row["form"], row["projection"]): number(row["error"], 3) for row in rows}
        lines = [[k, FORMS[f], *(cells[k, f, p] for p in PROJECTIONS)] for k in KERNELS for f in FORMS]
        return Table(f"Relative error of Gram matrices, M = {most:,}", ["kernel", "features", *PROJECTIONS], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        """Error by M, with one column per kernel and one row per form."""

        def panel(kernel: str, form: str) -> Panel:
            lines = lines_of(rows_with(result["rows"], kernel=kernel, form=form), "features", "error", "projection")
            title = f"{kernel.capitalize()} kernel, {FORMS[form]}"
            return Panel(title, "M, features", "relative error", lines, (-0.5, "M^(-1/2)"))

        settings = result["settings"]
        size = f"{settings['length']} points in {settings['dim']} dimensions, {settings['draws']} draws"
        title = f"Random Fourier features of Gram matrices: {size} (bands: standard error)"
        return {"gram_error": draw(title, [[panel(kernel, form) for kernel in KERNELS] for form in FORMS], 4)}
