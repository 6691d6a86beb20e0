"""Random projections ω for feature maps: independent, orthogonal, or Hadamard-Rademacher rows.

All three have rows with the norms of a Gaussian's, so that they differ only in how the directions repel each other.
Draws use a private generator on the CPU in float64: the same on every device and rank, and the global RNG is left
alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from ..ops import walsh_hadamard_transform

Projection = Literal["iid", "orthogonal", "hadamard"]


def seeded_generator(*parts: int) -> Generator:
    """A generator whose stream depends on every part: seed, layer, number of the draw, …"""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + int(part) + 1442695040888963407) % 2**63
    return torch.Generator(device="cpu").manual_seed(mixed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices of a head's size are too small to share: threads that wait for each other in each of the hundreds of a
    model take seconds on a busy machine instead of milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def draw_projection(
    kind: Projection, heads: int, rows: int, dim: int, generator: Generator, hadamard_blocks: int = 3
) -> Tensor:
    """Draw ω, `[heads, rows, dim]` float64; above `dim` rows, independent blocks are stacked.

    >>> w = draw_projection("orthogonal", 1, 4, 4, seeded_generator(0))[0]
    >>> gram = w @ w.T
    >>> bool((gram - gram.diag().diag()).abs().max() < 1e-12)
    True
    """
    if kind == "iid":
        return torch.randn(heads, rows, dim, generator=generator, dtype=torch.float64, device="cpu")
    if kind == "orthogonal":
        width = dim
        stack = heads * -(-rows // width)
        gaussian = torch.randn(stack, width, width, generator=generator, dtype=torch.float64, device="cpu")
        directions, r = torch.linalg.qr(gaussian)
        # QR alone is not uniform over rotations; the signs of R's diagonal make it so.
        directions = directions * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
    elif kind == "hadamard":
        width = 1 << (dim - 1).bit_length()
        stack = heads * -(-rows // width)
        directions = hadamard_rotation(width, hadamard_blocks, generator, batch=(stack,))
    else:
        raise ValueError(f"Unknown projection {kind!r}; choose one of {', '.join(get_args(Projection))}.")
    directions = directions.reshape(heads, -1, width)[:, :rows]
    gaussian = torch.randn(heads, rows, width, generator=generator, dtype=torch.float64, device="cpu")
    return (directions * gaussian.norm(dim=-1, keepdim=True))[..., :dim]


def hadamard_rotation(dim: int, blocks: int, generator: Generator, batch: tuple[int, ...] = ()) -> Tensor:
    """Orthogonal matrices (H D_k)…(H D_1), D_i random signs, `[*batch, dim, dim]` float64; `dim` a power of two.

    The product, not the sum: a sum of rotations is not a rotation.
    """
    signs = torch.randint(0, 2, (*batch, blocks, dim), generator=generator, device="cpu").to(torch.float64) * 2 - 1
    rotation = torch.eye(dim, dtype=torch.float64, device="cpu").expand(*batch, dim, dim)
    for block in range(blocks):
        # Row i of `rotation` holds the image of basis vector i; each block maps x to H D x.
        rotation = walsh_hadamard_transform(rotation * signs[..., block, None, :])
    return rotation.mT
