"""Communication between processes if torch.distributed is initialized; otherwise there is one process."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

Value = TypeVar("Value")


def process_count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def process_rank() -> int:
    return distributed.get_rank() if process_count() > 1 else 0


def from_first(value: Value) -> Value:
    """Broadcast a value from the first process."""
    values = [value]
    if process_count() > 1:
        distributed.broadcast_object_list(values, src=0)
    return values[0]


def check_alike(**values: Any) -> None:
    """Raise ValueError on all processes if one of these values differs between them."""
    found: list[Any] = [values] * process_count()
    if process_count() > 1:
        distributed.all_gather_object(found, values)
    for name in values:
        if any(each[name] != found[0][name] for each in found):
            raise ValueError(
                f"The processes differ in {name}: {', '.join(str(each[name]) for each in found)}. Give all of them the "
                "same model, seed and options, since they train one model together."
            )


def sum_over_processes(tensors: Sequence[Tensor]) -> None:
    """Sum tensors over all processes, in place and in one message."""
    if process_count() == 1 or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    distributed.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
