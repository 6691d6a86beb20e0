"""Splits sequences into blocks, which are computed one after another, and tiles, which are computed together.

In traced code, lengths are symbols, and one graph must handle all lengths. There is then one block, sequences are
padded by a constant number of positions, there are always at least two tiles, and some positions are always left over
(otherwise strides would reveal lengths that fit).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = {"cpu": 2**20}  # elements of the largest tensor of a block; a few such tensors fit into the CPU's caches
OTHER_BLOCK = 2**26  # on other devices: enough work per kernel


def traced() -> bool:
    """Whether a compiler or a `torch.func` transform traces the code, which then needs plain operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def block_size(x: Tensor, width: int, least: int = 1, multiple: int = 1) -> int:
    """Number of positions per block of x `[B, H, L, D]`, if the largest tensor has `width` elements per position and
    head. Blocks are about equal, with at least `least` positions, rounded up to a multiple of `multiple`.
    """
    B, H, L, D = x.shape
    if traced():
        return L
    longest = max(BLOCK.get(x.device.type, OTHER_BLOCK) // max(B * H * max(D, width), 1), least)
    size = -(-L // max(-(-L // longest), 1))
    return max(-(-size // multiple) * multiple, 1)


def into_tiles(x: Tensor, size: int, kv_heads: int, value: float = 0.0) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, T, G · size, E]`, padded with a value: tiles of positions, in each of which the G
    query heads that share a key head are stacked.
    """
    if traced():
        tiles = F.pad(x, (0, 0, 0, traced_filling(size)), value=value).unfold(2, size, size).mT
    else:
        missing = -x.shape[2] % size
        tiles = (F.pad(x, (0, 0, 0, missing), value=value) if missing else x).unflatten(2, (-1, size))
    if x.shape[1] != kv_heads:
        tiles = tiles.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3, 4)
    if traced():  # whether they are already contiguous depends on the length
        return tiles.clone(memory_format=torch.contiguous_format)
    return tiles.contiguous()  # otherwise every matrix product would copy them


def from_tiles(x: Tensor, heads: int, length: int) -> Tensor:
    """`[B, Hkv, T, G · size, E]` → `[B, H, L, E]`."""
    if x.shape[1] != heads:
        x = x.unflatten(3, (heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)
    return x.flatten(2, 3)[:, :, :length]


def traced_filling(size: int) -> int:
    """Number of positions by which sequences are padded in traced code."""
    return 2 * size + 1


def windows(x: Tensor, start: int, stop: int, size: int, width: int) -> Tensor:
    """Windows of `width` positions, one every `size`, over positions start to stop: `[B, H, L, E]` → `[B, H, T, width,
    E]`. Positions outside of the sequence are zero.
    """
    length = x.shape[2]
    if traced():  # keep the whole sequence and always pad at the end
        x = F.pad(x[:, :, max(start, 0) :], (0, 0, max(-start, 0), stop - length))
    else:
        x = x[:, :, max(start, 0) : min(stop, length)]
        if start < 0 or stop > length:
            x = F.pad(x, (0, 0, max(-start, 0), max(stop - length, 0)))
    return x.unfold(2, width, size).mT
