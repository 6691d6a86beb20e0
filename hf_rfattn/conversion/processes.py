"""Several processes, where torch.distributed is initialised; one otherwise."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


def process_count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def process_rank() -> int:
    return distributed.get_rank() if process_count() > 1 else 0


def sum_over_processes(tensors: Sequence[Tensor]) -> None:
    """In place; several in one message."""
    if process_count() == 1 or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
