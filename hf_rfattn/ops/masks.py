"""Masks: visible keys, global keys (seen by every query of their sequence), and packed sequences."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


def global_keys(
    length: int, count: int, key_mask: Tensor | None, causal: bool, segments: Tensor | None, device: torch.device
) -> Tensor:
    """`[B or 1, L]`, True for the first `count` visible keys of each sequence and, unless causal, the last `count`."""
    visible = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    chosen = _rank(visible, segments) < count
    if not causal:
        flipped = None if segments is None else segments.flip(1)
        chosen = chosen | (_rank(visible.flip(1), flipped) < count).flip(1)
    return chosen & visible


def _rank(visible: Tensor, segments: Tensor | None) -> Tensor:
    """Number of visible keys of the same segment before each position."""
    before = visible.long().cumsum(1) - visible.long()
    if segments is None:
        return before
    before = before.expand_as(segments)
    return before - before.masked_fill(~segment_starts(segments), 0).cummax(1).values


def segment_starts(segments: Tensor) -> Tensor:
    """`[B, L]`, True where a segment begins."""
    return torch.cat([torch.ones_like(segments[:, :1], dtype=torch.bool), segments[:, 1:] != segments[:, :-1]], dim=1)


def positions_of(chosen: Tensor, slots: int, segments: Tensor | None) -> Tensor:
    """Positions of the first `slots` chosen keys of each query's sequence, -1 in empty slots: `[B, L, N]`, or `[B, 1,
    N]` without segments.
    """
    B, L = chosen.shape
    number = torch.zeros(B, 1, dtype=torch.long, device=chosen.device)  # of the sequence of each query
    if segments is not None:
        number = segment_starts(segments).long().cumsum(1) - 1
    slot = _rank(chosen, segments)
    table = torch.full((B, (1 if segments is None else L) * slots + 1), -1, device=chosen.device)
    cell = torch.where(chosen & (slot < slots), number * slots + slot, table.shape[1] - 1)  # the last takes the others
    table = table.scatter(1, cell, torch.arange(L, device=chosen.device).expand(B, L))[:, :-1]
    rows = number[:, :, None] * slots + torch.arange(slots, device=chosen.device)
    return table.gather(1, rows.flatten(1)).view(B, -1, slots)


class Unpacked(NamedTuple):
    """Positions of some packed sequences, one per row of `[S, N]` tensors."""

    row: Tensor  # [S, 1]
    position: Tensor
    inside: Tensor  # False after the end of a sequence

    def take(self, x: Tensor) -> Tensor:
        """`[B, H, L, E]` → `[S, H, N, E]`."""
        return x.transpose(1, 2)[self.row, self.position].transpose(1, 2)

    def put(self, out: Tensor, part: Tensor) -> Tensor:
        """The reverse of `take`, into a tensor `[B, H, L, E]`."""
        at = self.row.expand_as(self.position)[self.inside], self.position[self.inside]
        return out.transpose(1, 2).index_put(at, part.transpose(1, 2)[self.inside]).transpose(1, 2)


def unpack(segments: Tensor) -> Iterator[Unpacked]:
    """Unpack rows `[B, L]` into groups of sequences of similar length, so that less than half is padding.

    Reads the lengths from the device, which synchronizes a GPU.
    """
    row, start = segment_starts(segments).nonzero(as_tuple=True)
    size = torch.diff(row * segments.shape[1] + start, append=row.new_tensor([segments.numel()]))
    groups = size.sub(1).log2().floor()
    for group in groups.unique().tolist():
        mine = groups == group
        steps = torch.arange(int(size[mine].max()), device=segments.device)
        position = (start[mine, None] + steps).clamp(max=segments.shape[1] - 1)
        yield Unpacked(row[mine, None], position, steps < size[mine, None])
