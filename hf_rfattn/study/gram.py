"""Gram matrices of shift-invariant kernels against their random Fourier approximation, as features are added.

K(x - y) ≈ φ(x)ᵀφ(y), error ‖φφᵀ - K‖ / ‖K‖ (Frobenius), which independent features bring down as M^(-1/2). Both real
forms of Rahimi and Recht (2007), cosines with a random phase and pairs of sine and cosine, and three projections.

The frequencies of the Gaussian kernel are normal, so that orthogonal or Hadamard rows can take their place. Those of
the Laplace and the Cauchy kernel are independent by coordinate and not isotropic: rows of theirs cannot be orthogonal.
Here a normal row g, structured or not, becomes F⁻¹(Φ(g)) by coordinate, with F the distribution of the kernel's
frequencies (a Gaussian copula). Every iid or orthogonal row is normal, so this is exact for them, and rows still repel
each other; the coordinates of a Hadamard row are only nearly normal.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..features import KERNELS, FourierFeatures, kernel_matrix
from ..features.projections import seeded_generator
from ..results import Table, number
from ..results.plots import draw_rows, line_style, log_log, rate_line, title_and_legend
from .base import Advance, Result, Study, mean_columns, rows_with
from .mse import draw

FORMS = {"sincos": "sine and cosine", "cos": "cosine with a phase"}
PROJECTIONS = ("iid", "orthogonal", "hadamard")
PICTURE = ("sincos", "orthogonal")


def frequencies(kernel: str, normal: Tensor) -> Tensor:
    """Frequencies of a kernel from normal numbers, by coordinate.

    >>> frequencies("laplace", torch.tensor([0.0, 0.6744898]))  # medians of |ω| are that of a Cauchy, 1
    tensor([0.0000, 1.0000])
    """
    if kernel == "laplace":  # its frequencies have Cauchy's distribution
        return torch.tan(math.pi / 2 * torch.erf(normal / math.sqrt(2)))
    if kernel == "cauchy":  # and the other way round
        return -normal.sign() * torch.log(torch.erfc(normal.abs() / math.sqrt(2)))
    return normal


def smooth_points(length: int, dim: int, generator: torch.Generator) -> Tensor:
    """Points `[L, dim]` along a closed curve of a few harmonics, so that Gram matrices have something to show."""
    t = torch.arange(length, dtype=torch.float64) / length * 2 * math.pi
    points = torch.zeros(length, dim, dtype=torch.float64)
    for harmonic in (1, 2, 5):
        amplitude, phase = (torch.rand(dim, generator=generator, dtype=torch.float64) for _ in range(2))
        points += amplitude * torch.cos(harmonic * t[:, None] + 2 * math.pi * phase) / harmonic**0.5
    return points / points.std(0) / dim**0.5  # mean squared distance 2


@dataclass(frozen=True)
class GramStudy(Study):
    """`features`: lengths of φ. `draws`: of the projection. `pictures`: lengths of φ to show. `length`: points."""

    features: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)
    draws: int = 10
    pictures: tuple[int, ...] = (16, 128, 1024)
    length: int = 64
    dim: int = 8
    seed: int = 0

    name: ClassVar[str] = "gram"
    full_settings: ClassVar[dict[str, Any]] = {"draws": 40, "features": tuple(2**i for i in range(3, 13))}

    def measure(self, advance: Advance) -> Result:
        points = smooth_points(self.length, self.dim, seeded_generator(self.seed))
        rows, pictures = [], {}
        for kernel in KERNELS:
            exact = kernel_matrix(kernel, points, points)
            pictures[kernel] = {"exact": _encoded(exact)}
            for index, form in enumerate(FORMS):
                for projection in PROJECTIONS:
                    for M in self.features:
                        generator = seeded_generator(self.seed, index, PROJECTIONS.index(projection), M)
                        estimates = self._approximate(kernel, form, projection, M, points, generator)
                        errors = (estimates - exact).norm(dim=(-2, -1)) / exact.norm()
                        row = {"kernel": kernel, "form": form, "projection": projection, "features": M}
                        rows.append(row | mean_columns("error", errors.tolist()))
                        if M in self.pictures and (form, projection) == PICTURE:
                            pictures[kernel][str(M)] = _encoded(estimates[0])
                        advance(f"{kernel}, {FORMS[form]}, {projection}")
        return {"rows": rows, "pictures": pictures}

    def _approximate(
        self, kernel: str, form: str, projection: str, M: int, points: Tensor, generator: torch.Generator
    ) -> Tensor:
        """φφᵀ of every draw, `[draws, L, L]`."""
        options: dict[str, Any] = {"kernel": kernel, "form": form, "normalize_qk": False, "projection": "iid"}
        phi_map = FourierFeatures(self.draws, M, self.dim, (self.seed, M), **options).double()
        normal = draw(projection, phi_map.projection.shape, generator)
        phi_map.projection.copy_(frequencies(kernel, normal))
        phi: Any = phi_map("query").exactly(points.expand(1, self.draws, -1, -1)).factor  # without exp(|x|²/2)
        return (phi @ phi.mT)[0]

    @staticmethod
    def table(result: Result) -> Table:
        """Error with the most features."""
        rows = rows_with(result["rows"], features=result["settings"]["features"][-1])
        cells = {(row["kernel"], row["form"], row["projection"]): number(row["error"], 3) for row in rows}
        lines = [[k, FORMS[f], *(cells[k, f, p] for p in PROJECTIONS)] for k in KERNELS for f in FORMS]
        title = f"Relative error of Gram matrices, M = {result['settings']['features'][-1]:,}"
        return Table(title, ["kernel", "features", *PROJECTIONS], lines)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        return {"gram_matrices": _matrices(result), "gram_error": _errors(result)}


def _encoded(matrix: Tensor) -> list[str]:
    """A line of hundredths for each row: a matrix of numbers would make the document ten times as long."""
    return [" ".join(f"{100 * value:.0f}" for value in row) for row in matrix.tolist()]


def _decoded(lines: list[str]) -> list[list[float]]:
    return [[int(word) / 100 for word in line.split()] for line in lines]


def _matrices(result: Result) -> Figure:
    """A row each kernel: exact, then with more and more features."""
    pictures = result["pictures"]
    names = list(pictures["gaussian"])
    figure = Figure(figsize=(2.3 * len(names) + 0.9, 2.25 * len(pictures) + 0.5), layout="constrained")
    grid = figure.subplots(len(pictures), len(names), squeeze=False)
    for line, (kernel, matrices) in zip(grid, pictures.items(), strict=True):
        for axes, name in zip(line, names, strict=True):
            image = axes.imshow(_decoded(matrices[name]), vmin=-0.25, vmax=1, cmap="cividis", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if axes in grid[0]:
                axes.set_title("exact" if name == "exact" else f"M = {int(name):,}")
        line[0].set_ylabel(kernel.capitalize(), fontsize=12)
    figure.colorbar(image, ax=grid, label="kernel value", shrink=0.6, extend="min")
    figure.suptitle(f"Gram matrices and φφᵀ ({FORMS[PICTURE[0]]}, {PICTURE[1]} rows, one draw)")
    return figure


def _errors(result: Result) -> Figure:
    """Error by M: a column each kernel, a row each form."""
    settings = result["settings"]
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(len(FORMS), len(KERNELS), sharex=True, sharey="col")
    for line, form in zip(grid, FORMS, strict=True):
        for axes, kernel in zip(line, KERNELS, strict=True):
            for projection in PROJECTIONS:
                rows = rows_with(result["rows"], kernel=kernel, form=form, projection=projection)
                draw_rows(axes, rows, "features", "error", label=projection, **line_style(projection))
            top = max(r["error"] for r in result["rows"] if r["kernel"] == kernel)
            rate_line(axes, settings["features"], 1.3 * top, -0.5, "M^(-1/2)")
            log_log(axes, settings["features"])
        line[0].set_ylabel(f"{FORMS[form]}\nrelative error")
    for axes, kernel in zip(grid[0], KERNELS, strict=True):
        axes.set_title(f"{kernel.capitalize()} kernel")
    for axes in grid[-1]:
        axes.set_xlabel("M, features")
    size = f"{settings['length']} points in {settings['dim']} dimensions, {settings['draws']} draws"
    title_and_legend(figure, f"Random Fourier features of Gram matrices: {size} (bands: standard error)")
    return figure
