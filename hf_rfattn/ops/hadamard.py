"""The fast Walsh-Hadamard transform, O(d log d), and the matrix that defines it."""

import torch
from torch import Tensor


def hadamard_matrix(dim: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """The normalised (orthogonal, symmetric) Hadamard matrix of Sylvester's order; `dim` must be a power of two.

    >>> (hadamard_matrix(2) * 2**0.5).round()
    tensor([[ 1.,  1.],
            [ 1., -1.]])
    """
    _check_power_of_two(dim)
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)], dim=0)
    return h / dim**0.5


def walsh_hadamard_transform(x: Tensor) -> Tensor:
    """`x @ hadamard_matrix(d)` over the last dimension by d log₂ d additions."""
    dim = x.shape[-1]
    _check_power_of_two(dim)
    shape = x.shape
    half = 1
    while half < dim:
        a, b = x.reshape(-1, dim // (2 * half), 2, half).unbind(2)
        x = torch.stack([a + b, a - b], dim=2)
        half *= 2
    return x.reshape(shape) / dim**0.5


def _check_power_of_two(dim: int) -> None:
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"A Hadamard transform needs a power of two, not {dim}; pad with zeros to the next one.")
