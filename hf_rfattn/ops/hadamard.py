"""The fast Walsh-Hadamard transform and the matrix that defines it."""

import torch
from torch import Tensor


def hadamard_matrix(dim: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Return the normalised (orthogonal, symmetric) Hadamard matrix in Sylvester's order; `dim` is a power of two.

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
    """Compute `x @ hadamard_matrix(d)` over the last dimension.

    Since H_ab = H_a ⊗ H_b, the transform of x as an a × b matrix is H_a x H_b: two small matrix products instead of one
    of size d² or log₂ d passes of additions.
    """
    dim = x.shape[-1]
    _check_power_of_two(dim)
    factors = [hadamard_matrix(size, dtype=x.dtype, device=x.device) for size in _factors(dim)]
    y, rest = x, dim
    for factor in factors[:-1]:  # each acts on the leading part of the remaining dimension
        rest //= len(factor)
        y = factor @ y.reshape(-1, len(factor), rest)
    return (y.reshape(-1, len(factors[-1])) @ factors[-1]).reshape(x.shape)


def _factors(dim: int) -> list[int]:
    """Sizes of the small matrices: one up to d = 64, two up to 2,048, three beyond, as measured."""
    count = 1 if dim <= 64 else 2 if dim <= 2048 else 3
    log = dim.bit_length() - 1
    return [2 ** (log // count + (i < log % count)) for i in range(count)]


def _check_power_of_two(dim: int) -> None:
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"A Hadamard transform needs a power of two, not {dim}; pad with zeros to the next one.")
