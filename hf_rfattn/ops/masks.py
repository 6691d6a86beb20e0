"""Which keys are visible, and which of them are global: seen by every query of their sequence."""

import torch
from torch import Tensor


def global_keys(
    length: int, count: int, key_mask: Tensor | None, causal: bool, segments: Tensor | None, device: torch.device
) -> Tensor:
    """`[B or 1, L]`, True for the first `count` visible keys of each sequence and, unless causal, the last ones too."""
    visible = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    chosen = _rank(visible, segments) < count
    if not causal:
        flipped = None if segments is None else segments.flip(1)
        chosen = chosen | (_rank(visible.flip(1), flipped) < count).flip(1)
    return chosen & visible


def _rank(visible: Tensor, segments: Tensor | None) -> Tensor:
    """How many visible keys of its own segment stand before each position."""
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
    if segments is None:
        number = query_number = torch.zeros(B, 1, dtype=torch.long, device=chosen.device)
    else:
        number = query_number = segment_starts(segments).long().cumsum(1) - 1
    number = number.expand(B, L)
    slot = _rank(chosen, None if segments is None else number)
    table = torch.full((B, (1 if segments is None else L) * slots + 1), -1, device=chosen.device)
    cell = torch.where(chosen & (slot < slots), number * slots + slot, table.shape[1] - 1)  # the last takes the others
    table = table.scatter(1, cell, torch.arange(L, device=chosen.device).expand(B, L))[:, :-1]
    rows = query_number[:, :, None] * slots + torch.arange(slots, device=chosen.device)
    return table.gather(1, rows.flatten(1)).view(B, -1, slots)
