"""Cutting sequences into tiles, and the pairs of positions a tile of queries shares with its neighbourhood of keys.

With C positions a tile, query a of a tile stands at distance `left * C + a - b` from key b of its neighbourhood (the
`left` tiles before it, itself, and the `right` tiles after it): the same for every tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def into_tiles(x: Tensor, size: int) -> Tensor:
    """`[B, H, L, E]` → `[B, H, T, C, E]`, the end filled with zeros."""
    length = x.shape[2]
    count = -(-length // size)
    x = F.pad(x, (0, 0, 0, count * size - length))
    return x.reshape(*x.shape[:2], count, size, x.shape[-1])


def queries_into_tiles(x: Tensor, size: int, kv_heads: int) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, T, G * C, E]`: the G query heads that share a key head lie in one tile."""
    tiles = into_tiles(x, size)
    B, H, T, C, E = tiles.shape
    return tiles.view(B, kv_heads, H // kv_heads, T, C, E).transpose(2, 3).reshape(B, kv_heads, T, -1, E)


def queries_from_tiles(tiles: Tensor, heads: int, length: int) -> Tensor:
    """The inverse of `queries_into_tiles`."""
    B, K, T, GC, E = tiles.shape
    groups = heads // K
    x = tiles.view(B, K, T, groups, GC // groups, E).transpose(2, 3)
    return x.reshape(B, heads, -1, E)[:, :, :length]


def neighbourhood(tiles: Tensor, left: int, right: int, fill: float = 0.0) -> Tensor:
    """`[B, H, T, C, E]` → `[B, H, T, (left + 1 + right) * C, E]`, `fill` beyond the ends."""
    if left == right == 0:
        return tiles
    count = tiles.shape[2]
    padded = F.pad(tiles, (0, 0, 0, 0, left, right), value=fill)
    return torch.cat([padded[:, :, o : o + count] for o in range(left + 1 + right)], dim=3)


def visible_tiles(key_mask: Tensor | None, batch: int, length: int, size: int, device: torch.device) -> Tensor:
    """`[B, 1, T, C, 1]`, True where a key exists and is not padding (B is 1 without a mask)."""
    if key_mask is None:
        key_mask = torch.ones(1, length, dtype=torch.bool, device=device)
    return into_tiles(key_mask[:, None, :, None], size)


def pairs(
    visible: Tensor, segments: Tensor | None, left: int, right: int, causal: bool, band: tuple[int | None, int | None]
) -> Tensor:
    """Which pairs count: `[B or 1, 1, T, C, (left + 1 + right) * C]`.

    `band = (within, outside)`: distance at most `within`, or more than `outside`; None for no such limit.
    """
    C = visible.shape[3]
    a = torch.arange(C, device=visible.device)[:, None]
    b = torch.arange((left + 1 + right) * C, device=visible.device)[None, :]
    distance = left * C + a - b
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    within, outside = band
    if within is not None:
        allowed = allowed & (distance.abs() <= within)
    if outside is not None:
        allowed = allowed & (distance.abs() > outside)
    allowed = allowed & neighbourhood(visible, left, right).transpose(-1, -2)
    if segments is not None:
        allowed = allowed & (segments == neighbourhood(segments, left, right).transpose(-1, -2))
    return allowed
