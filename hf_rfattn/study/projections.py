"""The projections that studies compare, among them a sum of Hadamard blocks, which is no rotation."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from ..features import draw_projection, hadamard_rotation
from ..features.maps import RandomFeatures


def sum_of_blocks(draws: int, rows: int, dim: int, generator: Generator, blocks: int) -> Tensor:
    """Rows of H D_1 + … + H D_k, in place of the product, with the norms of a Gaussian's.

    Column c of the sum is column c of H times a sum of signs, which differs from
    column to column: rows are not orthogonal, and for two blocks half of the columns vanish.

    >>> w = sum_of_blocks(1, 4, 4, torch.Generator().manual_seed(0), blocks=1)[0]
    >>> gram = w @ w.T
    >>> bool((gram - gram.diag().diag()).abs().max() < 1e-12)  # one block is a rotation
    True
    """
    stack = draws * -(-rows // dim)
    directions = torch.stack(
        [sum(hadamard_rotation(dim, 1, generator) for _ in range(blocks)) for _ in range(stack)]  # type: ignore[misc]
    )
    directions = directions.reshape(draws, -1, dim)[:, :rows]
    size = directions.norm(dim=-1, keepdim=True).clamp(min=1e-12)  # signs can cancel in every column
    gaussian = torch.randn(draws, rows, dim, generator=generator, dtype=torch.float64)
    return directions / size * gaussian.norm(dim=-1, keepdim=True)


def draw(name: str, shape: Sequence[int], generator: Generator) -> Tensor:
    """Independent draws of ω by a name of `results.plots.STYLES`; `shape` is draws, rows, dim."""
    draws, rows, dim = shape
    kind, _, count = name.partition(", ")
    if kind == "sum of 3 blocks":
        return sum_of_blocks(draws, rows, dim, generator, blocks=3)
    return draw_projection(kind, draws, rows, dim, generator, int(count[0]) if count else 3)  # type: ignore[arg-type]


def use_projection(feature_map: RandomFeatures, omega: Tensor) -> None:
    """Put ω, `[draws, rows, dim]`, in place of what a map drew for its heads: studies take a head for each draw."""
    feature_map.projection.copy_(omega)
