"""The state of generation: tensors of a fixed size, the batch first, that hold all that is known of the past."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass
class State:
    """Base of all states: dataclasses of tensors, of other states, and of lists of these.

    `empty` gives the value a field has when nothing was seen, if that is not zero.
    """

    empty: ClassVar[dict[str, float]] = {}

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        return [tensor for _, tensor in self._named()]

    def _named(self) -> Iterator[tuple[float, Tensor]]:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, State):
                    yield from item._named()
                elif item is not None:
                    yield self.empty.get(field.name, 0.0), item

    def reset(self) -> None:
        """Forget everything, in place."""
        for value, tensor in self._named():
            tensor.fill_(value)

    def map(self, function: Any) -> "State":
        """The same state of other tensors: `function` of each."""

        def mapped(value: Any) -> Any:
            if isinstance(value, list):
                return [mapped(item) for item in value]
            return value.map(function) if isinstance(value, State) else None if value is None else function(value)

        return type(self)(**{field.name: mapped(getattr(self, field.name)) for field in fields(self)})

    def index_select(self, rows: Tensor) -> "State":
        """The state of some sequences of the batch, in any order, repeated or not."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def to(self, device: torch.device | str) -> "State":
        """The state on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy_(self, other: "State") -> None:
        """Take the values of another state of the same shape, at the same addresses."""
        with torch.no_grad():
            for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
                if mine is not theirs:
                    mine.copy_(theirs)
