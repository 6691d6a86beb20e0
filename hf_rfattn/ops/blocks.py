"""Sequences in blocks of positions, small enough to stay near a CPU; the far field, and its sums over keys block by
block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import Inputs
from .linear_attention import Features, State, combine, sum_keys
from .recompute import recompute
from .scratch import kept, may_overwrite, scratch

BLOCK = {"cpu": 2**20}  # numbers in the largest tensor of a block: a few of them stay in a CPU's caches
OTHER_BLOCK = 2**26  # elsewhere: enough work for each kernel


class FarField(NamedTuple):
    """φ of queries and of keys times a number, and its sizes."""

    queries: Callable[[Tensor, float], Features]
    keys: Callable[[Tensor, float], Features]
    num_features: int
    scales: int  # columns of Features.log


def block_length(length: int, numbers: int, least: int, size: int, device: torch.device) -> int:
    """Positions a block, a multiple of the tile, all blocks about equal: `numbers` is what one position brings to the
    largest tensor.
    """
    longest = max(BLOCK.get(device.type, OTHER_BLOCK) // numbers, least)
    even = -(-length // -(-length // longest))
    return -(-even // size) * size


class Rows:
    """The output, block by block: written in place, or joined at the end where autograd must see it."""

    def __init__(self, shape: torch.Size, value_dim: int, like: Tensor):
        self.shape, self.like = (*shape, value_dim), like
        self.parts: list[Tensor] = []
        self.whole: Tensor | None = None

    def place(self, rows: slice, dtype: torch.dtype) -> Tensor | None:
        """Where to write some rows of this type, if that can be done in place."""
        if dtype != self.like.dtype or not may_overwrite():
            return None
        if self.whole is None:
            self.whole = self.like.new_empty(self.shape)
        return self.whole[:, :, rows]

    def put(self, part: Tensor | None, rows: slice) -> None:
        """None leaves them out: all of them, or no block is."""
        if part is None:
            return
        if not may_overwrite():
            self.parts.append(part)
        elif self.whole is None and part.shape[2] == self.shape[2]:
            self.parts.append(kept(part))
        elif (place := self.place(rows, self.like.dtype)) is not None and place.data_ptr() != part.data_ptr():
            place.copy_(part)

    @property
    def empty(self) -> bool:
        return self.whole is None and not self.parts

    def joined(self) -> Tensor:
        if self.whole is not None:
            return self.whole
        return torch.cat(self.parts, dim=2) if len(self.parts) > 1 else self.parts[0].to(self.like.dtype)


def no_keys(inputs: Inputs, far: FarField) -> State:
    B, K, _, D = inputs.v.shape
    like = inputs.v.new_empty((), dtype=inputs.dtype)
    return State.empty(B, K, features=far.num_features, scales=far.scales, value_dim=D, like=like)


def keys_shown(inputs: Inputs, far: FarField, rows: slice, y: Tensor) -> Features:
    """φ of the keys y, which are these rows of all; zero for those that do not exist."""
    k = far.keys(y.to(inputs.dtype), inputs.root)
    return k if inputs.key_mask is None else k.only(inputs.key_mask[:, None, rows, None])


def key_blocks(inputs: Inputs, far: FarField) -> list[slice]:
    """Blocks to sum keys in: of no fewer keys than there are features, so that sums are no larger than values."""
    B, K, L, D = inputs.k.shape
    width = max(D, far.num_features)
    return slices(L, block_length(L, B * K * width, width, 1, inputs.k.device))


def product_dtype(given: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """Of products of values with weights from 0 to 1: bfloat16 as it came, since what is rounded there, and summed in
    float32, is rounded to it in the end anyway. Exponents and signed sums need more.
    """
    return given if given == torch.bfloat16 else computed


def slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def summarise(inputs: Inputs, far: FarField, held: Sequence[Tensor] = ()) -> State:
    """The state that holds all visible keys."""
    state = None
    for rows in key_blocks(inputs, far):
        y, v = inputs.k[:, :, rows], inputs.v[:, :, rows]

        def sum_block(y: Tensor, v: Tensor, rows: slice = rows) -> tuple[Tensor, ...]:
            k = keys_shown(inputs, far, rows, y)
            return sum_keys(k, v.to(product_dtype(v.dtype, inputs.dtype) if k.factor is None else inputs.dtype))

        with scratch(y):
            block = State(*recompute(sum_block, y, v, held=held))
        state = block if state is None else combine(state, block)
    return no_keys(inputs, far) if state is None else state
