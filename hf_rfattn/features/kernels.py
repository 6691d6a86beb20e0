"""Shift-invariant kernels and their spectral densities (Bochner; Rahimi and Recht, 2007).

K(δ) = E cos(ωᵀδ) with ω drawn from the kernel's spectral density; all three have K(0) = 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Kernel(NamedTuple):
    value: Callable[[Tensor], Tensor]  # of differences [..., D]
    frequencies: Callable[[tuple[int, ...], Generator], Tensor] | None  # draws ω with iid coordinates; None: normal
    least: Callable[[Tensor, int], Tensor]  # smallest value at squared distance r2 in D dimensions


def _cauchy_draw(shape: tuple[int, ...], generator: Generator) -> Tensor:
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.tan(math.pi * (u - 0.5))


def _laplace_draw(shape: tuple[int, ...], generator: Generator) -> Tensor:
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return -torch.sign(u) * torch.log1p(-2 * u.abs())


KERNELS: dict[str, Kernel] = {
    "gaussian": Kernel(
        value=lambda delta: torch.exp(-delta.square().sum(-1) / 2),
        frequencies=None,
        least=lambda r2, dim: torch.exp(-r2 / 2),
    ),
    "laplace": Kernel(
        value=lambda delta: torch.exp(-delta.abs().sum(-1)),
        frequencies=_cauchy_draw,
        least=lambda r2, dim: torch.exp(-(dim * r2).sqrt()),
    ),
    "cauchy": Kernel(
        value=lambda delta: (1 / (1 + delta.square())).prod(-1),
        frequencies=_laplace_draw,
        least=lambda r2, dim: (1 + r2 / dim) ** -dim,
    ),
}


def kernel_matrix(name: str, x: Tensor, y: Tensor) -> Tensor:
    """The exact Gram matrix K(x_i - y_j), `[..., Lx, Ly]`.

    >>> kernel_matrix("gaussian", torch.zeros(1, 3), torch.zeros(2, 3))
    tensor([[1., 1.]])
    """
    return KERNELS[name].value(x.unsqueeze(-2) - y.unsqueeze(-3))
