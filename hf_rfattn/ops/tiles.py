"""Sequences in tiles of positions.

To a compiler lengths are symbols. Tiles are then filled up by a constant, there are always two or more, and some
positions are always left over (strides would show lengths that fit), so that one program serves all lengths.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import traced


def into_tiles(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """`[B, H, L, E]` → `[B, H, T, C, E]`, filled up with a value."""
    if traced():
        return F.pad(x, (0, 0, 0, traced_filling(size)), value=value).unfold(2, size, size).mT
    missing = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, missing), value=value) if missing else x).unflatten(2, (-1, size))


def traced_filling(size: int) -> int:
    """Positions that a compiler's sequences are filled up with."""
    return 2 * size + 1


def from_tiles(x: Tensor, length: int) -> Tensor:
    """`[B, H, T, C, E]` → `[B, H, L, E]`."""
    return x.flatten(2, 3)[:, :, :length]


def windows(x: Tensor, size: int, left: int, right: int) -> Tensor:
    """Tiles with those around them: `[B, H, T, (left + 1 + right) · C, E]`.

    x begins `left` tiles before the first one and ends `right` tiles behind the last.
    """
    if traced():
        return x.unfold(2, (left + 1 + right) * size, size).mT
    tiles = x.unflatten(2, (-1, size))
    count = tiles.shape[2] - left - right
    around = [tiles[:, :, start : start + count] for start in range(left + 1 + right)]
    return around[0] if len(around) == 1 else torch.cat(around, dim=3)
