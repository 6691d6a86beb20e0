"""Packed rows: several sequences in one, which must not see each other."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import segment_starts


class Unpacked(NamedTuple):
    """Where some of the sequences of packed rows lie, one a row of `[S, N]` tensors."""

    row: Tensor  # [S, 1]
    position: Tensor
    inside: Tensor  # False behind the end of a sequence

    def take(self, x: Tensor) -> Tensor:
        """`[B, H, L, E]` → `[S, H, N, E]`."""
        return x.transpose(1, 2)[self.row, self.position].transpose(1, 2)

    def put(self, out: Tensor, part: Tensor) -> Tensor:
        """The reverse, into a tensor `[B, H, L, E]`."""
        at = self.row.expand_as(self.position)[self.inside], self.position[self.inside]
        return out.transpose(1, 2).index_put(at, part.transpose(1, 2)[self.inside]).transpose(1, 2)


def unpack(segments: Tensor) -> Iterator[Unpacked]:
    """The sequences of packed rows `[B, L]`, those of about the same length together: less than half is padding.

    The device is asked how long they are.
    """
    length = segments.shape[1]
    row, start = segment_starts(segments).nonzero(as_tuple=True)
    stop = torch.cat([start[1:], start.new_full((1,), length)])
    stop = torch.where(stop <= start, length, stop)  # the next one begins in the next row
    size = stop - start
    for group in size.sub(1).clamp(min=0).log2().floor().unique().tolist() if len(size) else []:
        mine = size.sub(1).clamp(min=0).log2().floor() == group
        steps = torch.arange(int(size[mine].max()), device=segments.device)
        inside = steps < size[mine, None]
        position = (start[mine, None] + steps).clamp(max=length - 1)
        yield Unpacked(row[mine, None], position, inside)
