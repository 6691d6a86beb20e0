"""Random projections ω for feature maps: independent, orthogonal, or Hadamard-Rademacher rows.

The norms of the rows have the same distribution in all three, that of a Gaussian vector; only the dependence of their
directions differs. Draws use a private CPU generator in float64, so they are the same on every device and rank and do
not change the global random state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from ..ops import walsh_hadamard_transform

Projection = Literal["iid", "orthogonal", "hadamard"]


def seeded_generator(*parts: int) -> Generator:
    """Return a generator seeded by all parts: seed, layer, number of the draw, …"""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + int(part) + 1442695040888963407) % 2**63
    return torch.Generator(device="cpu").manual_seed(mixed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: matrices of a head's size are too small for several, and synchronizing threads for the hundreds
    of matrices of a model takes seconds instead of milliseconds on a busy machine.
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
    """Draw ω, `[heads, rows, dim]` in float64. More than `dim` rows are stacked from independent blocks.

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
        # QR is not uniform over rotations unless the signs of R's diagonal are fixed.
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
    """Orthogonal matrices (H D_k)…(H D_1) with random signs D_i, `[*batch, dim, dim]` in float64; `dim` is a power of
    two. A product, since a sum of rotations is not a rotation.
    """
    signs = torch.randint(0, 2, (*batch, blocks, dim), generator=generator, device="cpu").to(torch.float64) * 2 - 1
    rotation = torch.eye(dim, dtype=torch.float64, device="cpu").expand(*batch, dim, dim)
    for block in range(blocks):
        # Row i of `rotation` is the image of basis vector i; each block maps x to H D x.
        rotation = walsh_hadamard_transform(rotation * signs[..., block, None, :])
    return rotation.mT
