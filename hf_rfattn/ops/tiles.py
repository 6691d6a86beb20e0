"""How sequences are cut: into blocks that are computed one after another, and into tiles that are computed together.

To a compiler lengths are symbols. There is then one block, tiles are filled up by a constant, there are always two or
more of them, and some positions are always left over (strides would show lengths that fit), so that one program serves
all lengths.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = {"cpu": 2**20}  # numbers in the largest tensor of a block: a few of them stay in a CPU's caches
OTHER_BLOCK = 2**26  # elsewhere: enough work for each kernel


def traced() -> bool:
    """Whether a compiler or a transform of `torch.func` looks on: they need plain operations, not our backward."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def block_size(x: Tensor, width: int, least: int = 1, multiple: int = 1) -> int:
    """Positions in a block of x `[B, H, L, D]`, where the largest tensor has `width` numbers a position and head.

    Blocks are about equal, and have at least `least` positions, or a multiple of a number.
    """
    B, H, L, D = x.shape
    if traced():
        return L
    longest = max(BLOCK.get(x.device.type, OTHER_BLOCK) // max(B * H * max(D, width), 1), least)
    size = -(-L // max(-(-L // longest), 1))
    return max(-(-size // multiple) * multiple, 1)


def into_tiles(x: Tensor, size: int, kv_heads: int, value: float = 0.0) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, T, G · size, E]`, filled up with a value: tiles of positions, in each of which the G
    query heads that share a key head stand below each other.
    """
    if traced():
        tiles = F.pad(x, (0, 0, 0, traced_filling(size)), value=value).unfold(2, size, size).mT
    else:
        missing = -x.shape[2] % size
        tiles = (F.pad(x, (0, 0, 0, missing), value=value) if missing else x).unflatten(2, (-1, size))
    if x.shape[1] != kv_heads:
        tiles = tiles.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3, 4)
    if traced():  # whether they are contiguous depends on the length
        return tiles.clone(memory_format=torch.contiguous_format)
    return tiles.contiguous()  # products would copy them again and again


def from_tiles(x: Tensor, heads: int, length: int) -> Tensor:
    """`[B, Hkv, T, G · size, E]` → `[B, H, L, E]`."""
    if x.shape[1] != heads:
        x = x.unflatten(3, (heads // x.shape[1], -1)).transpose(2, 3).flatten(1, 2)
    return x.flatten(2, 3)[:, :, :length]


def traced_filling(size: int) -> int:
    """Positions that a compiler's sequences are filled up with."""
    return 2 * size + 1


def windows(x: Tensor, start: int, stop: int, size: int, width: int) -> Tensor:
    """Windows of `width` positions, one every `size`, of positions start to stop: `[B, H, L, E]` → `[B, H, T, width,
    E]`. What lies beyond the ends is zero.
    """
    length = x.shape[2]
    if traced():  # all of it, and always more behind it
        x = F.pad(x[:, :, max(start, 0) :], (0, 0, max(-start, 0), stop - length))
    else:
        x = x[:, :, max(start, 0) : min(stop, length)]
        if start < 0 or stop > length:
            x = F.pad(x, (0, 0, max(-start, 0), max(stop - length, 0)))
    return x.unfold(2, width, size).mT
