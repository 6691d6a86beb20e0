"""What attention is computed of: queries, keys and values, and which keys each query may see."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .scratch import fresh


class Inputs(NamedTuple):
    """Queries `[B, H, Lq, D]`, keys and values `[B, Hkv, Lk, D]` as they came, and what is known of them.

    `key_mask` `[B, Lk]` is True for keys that exist; `segments` `[B, L]` numbers packed sequences, each contiguous.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    root: float = 1.0  # the square root of the scores' scale, which queries and keys are multiplied by
    key_mask: Tensor | None = None
    causal: bool = False
    segments: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is computed: at least float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def scaled(self, x: Tensor) -> Tensor:
        """A piece of the queries or keys, as scores take it."""
        x = x.to(self.dtype)
        return torch.mul(x, self.root, out=fresh(x.shape, x))

    def value(self, v: Tensor) -> Tensor:
        """A piece of the values."""
        v = v.to(self.dtype)
        buffer = None if v.is_contiguous() else fresh(v.shape, v)
        return v.contiguous() if buffer is None else buffer.copy_(v)


def visible_keys(inputs: Inputs) -> Tensor:
    """How many keys each query sees, `[B or 1, 1, L or 1, 1]`."""
    length, mask, segments = inputs.k.shape[2], inputs.key_mask, inputs.segments
    if mask is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=inputs.k.device)
    ones = mask.to(inputs.dtype)
    if not inputs.causal and segments is None:
        return ones.sum(1)[:, None, None, None]
    before = ones.cumsum(1)
    if segments is not None:
        new = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        number = new.long().cumsum(1) - 1  # 0, 1, 2, … whatever the segments are called
        ends = torch.zeros_like(before.expand_as(segments)).scatter_reduce(
            1, number, before.expand_as(segments), "amax", include_self=False
        )
        starts = F.pad(ends[:, :-1], (1, 0))  # visible keys before each segment
        before = (before if inputs.causal else ends.gather(1, number)) - starts.gather(1, number)
    return before[:, None, :, None]
