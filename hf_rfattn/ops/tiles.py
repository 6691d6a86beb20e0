"""Cutting sequences into tiles, and the pairs of positions a tile of queries shares with its neighbourhood of keys.

With C positions a tile, query a of a tile stands at distance `left * C + a - b` from key b of its neighbourhood (the
`left` tiles before it, itself, and the `right` tiles after it): the same for every tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def into_tiles(x: Tensor, size: int) -> Tensor:
    """`[B, H, L, E]` → `[B, H, T, C, E]`; L is a multiple of the size."""
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def queries_into_tiles(x: Tensor, size: int, kv_heads: int) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, T, G * C, E]`: the G query heads that share a key head lie in one tile."""
    tiles = into_tiles(x, size)
    B, H, T, C, E = tiles.shape
    if kv_heads == H:
        return tiles
    return tiles.view(B, kv_heads, H // kv_heads, T, C, E).transpose(2, 3).reshape(B, kv_heads, T, -1, E)


def queries_from_tiles(tiles: Tensor, heads: int, length: int) -> Tensor:
    """The inverse of `queries_into_tiles`, cut to `length`."""
    B, K, T, GC, E = tiles.shape
    groups = heads // K
    x = tiles.view(B, K, T, groups, GC // groups, E).transpose(2, 3)
    return x.reshape(B, heads, -1, E)[:, :, :length]


def neighbourhood(tiles: Tensor, left: int, right: int) -> Tensor:
    """`[B, H, left + T + right, C, E]` → `[B, H, T, (left + 1 + right) * C, E]`: each tile with those around it."""
    if left == right == 0:
        return tiles
    count = tiles.shape[2] - left - right
    return torch.cat([tiles[:, :, o : o + count] for o in range(left + 1 + right)], dim=3)


def pairs(
    size: int,
    left: int,
    right: int,
    causal: bool,
    *,
    within: int | None = None,
    outside: int | None = None,
    visible: Tensor | None = None,
    segments: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which pairs count: `[B or 1, 1, T or 1, C, (left + 1 + right) * C]`.

    Distance at most `within`, or more than `outside`; keys `visible` and queries and keys in one of the `segments`,
    both `[B, 1, left + T + right, C, 1]`.
    """
    a = torch.arange(size, device=device)[:, None]
    b = torch.arange((left + 1 + right) * size, device=device)[None, :]
    distance = left * size + a - b
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if within is not None:
        allowed = allowed & (distance.abs() <= within)
    if outside is not None:
        allowed = allowed & (distance.abs() > outside)
    allowed = allowed[None, None, None]
    if visible is not None:
        allowed = allowed & neighbourhood(visible, left, right).transpose(-1, -2)
    if segments is not None:
        own = segments[:, :, left : segments.shape[2] - right]
        allowed = allowed & (own == neighbourhood(segments, left, right).transpose(-1, -2))
    return allowed


def with_halo(pieces: tuple[Tensor, ...], number: int, before: int, after: int, size: int) -> Tensor:
    """One of the blocks that `split` made (along dimension 2), filled up to a multiple of `size`, with `before`
    positions of the block before it and `after` of the one after it; zeros where there are none.
    """
    own = pieces[number]
    x = [own]
    missing = -own.shape[2] % size + after
    start = before
    if before and number:
        x.insert(0, pieces[number - 1][:, :, -before:])
        start = 0
    if after and number + 1 < len(pieces):
        x.append(pieces[number + 1][:, :, :after])
        missing -= x[-1].shape[2]
    joined = torch.cat(x, dim=2) if len(x) > 1 else own
    return F.pad(joined, (0, 0, start, missing)) if start or missing else joined
