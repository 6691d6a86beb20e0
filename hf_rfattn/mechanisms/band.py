"""Sliding-window attention: softmax over the keys within a band around the query.

out_i = softmax over |i - j| ≤ W of (x_iᵀy_j) · v_j, in O(L·W). This is the near field of FMMformer alone, and a control
for mechanisms that add a far field.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops import banded_attention, global_attention, global_keys, merge, with_global_rows
from ..ops.banded import Window
from ..ops.naive import allowed_pairs, masked_softmax, repeat_heads
from ..ops.sharded import Part, part_of_banded_attention, part_of_global_attention, part_with_global_rows
from .base import Mechanism
from .config import MechanismConfig, check_at_least, option
from .registry import register_mechanism


@dataclass(frozen=True)
class BandConfig(MechanismConfig):
    """Options of "band"."""

    bandwidth: int = option(64, "Window size: a query attends to keys at most this many positions away.")
    global_tokens: int = option(
        1, "Number of global tokens at the start of a sequence (and at its end, unless causal), as in Longformer."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")


class NearField(Mechanism):
    """Softmax over a band and global tokens. Base class of mechanisms with options `bandwidth` and `global_tokens`."""

    handles_cross_attention = False
    config: Any

    def near_field(self, q, k, v, **masks) -> tuple[Tensor, Tensor]:
        """Attention over the band and the global keys, and its log-sum-exp."""
        width, count = self.config.bandwidth, self.config.global_tokens
        near = banded_attention(q, k, v, width, **masks)
        return merge(near, global_attention(q, k, v, count, width, **masks)) if count else near

    def near_field_of_part(self, q, k, v, part: Part, **options) -> tuple[Tensor, Tensor]:
        """`near_field` for the queries of one process of a sharded sequence."""
        width, count = self.config.bandwidth, self.config.global_tokens
        near = part_of_banded_attention(q, k, v, width, part, **options)
        return merge(near, part_of_global_attention(q, k, v, count, width, part, **options)) if count else near

    def with_global_rows(self, out, q, k, v, scale, key_mask, causal, part: Part | None = None) -> Tensor:
        """Replace the rows of global tokens in `out` with softmax over all keys, unless causal."""
        count = self.config.global_tokens
        if causal or not count:
            return out
        if part is not None:
            return part_with_global_rows(out, q, k, v, count, part, scale=scale)
        return with_global_rows(out, q, k, v, count, scale=scale, key_mask=key_mask)

    def near_pairs(self, x, y, key_mask, causal, segments) -> Tensor:
        """The near field as a dense mask, True for pairs that are scored exactly."""
        count, (lengths, device) = self.config.global_tokens, ((x.shape[2], y.shape[2]), x.device)
        near = allowed_pairs(*lengths, key_mask, causal, segments, self.config.bandwidth, device)
        if count:
            chosen = global_keys(lengths[1], count, key_mask, causal, segments, device)[:, None]
            keys, queries = chosen[:, :, None], chosen[..., None] & (not causal)
            near = near | ((keys | queries) & allowed_pairs(*lengths, key_mask, causal, segments, None, device))
        return near

    def multiply_adds(self, length, causal):
        sides, count = 1 if causal else 2, self.config.global_tokens
        keys = min(length, sides * self.config.bandwidth + 1) + sides * count  # per query
        rows = 0 if causal else min(length, sides * count)  # global tokens, which attend to all keys
        return 2 * length * (keys + rows) * self.head_dim


class BandAttention(NearField):
    config: BandConfig

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        out, _ = self.near_field(q, k, v, scale=scale, key_mask=key_mask, causal=causal, segments=segments)
        return self.with_global_rows(out.to(q.dtype), q, k, v, scale, key_mask, causal)

    def attend_part(self, q, k, v, part, *, scale, causal):
        out, _ = self.near_field_of_part(q, k, v, part, scale=scale, causal=causal)
        return self.with_global_rows(out.to(q.dtype), q, k, v, scale, None, causal, part)

    def new_state(self, batch, value_dim, dtype, device):
        config, sizes = self.config, (batch, self.num_kv_heads, value_dim)
        return Window.new(*sizes, self.head_dim, config.bandwidth, config.global_tokens, dtype, device)

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        (out, _), _, window = state.attend(q, k, v, scale, key_mask)
        return out.to(q.dtype), window

    def dense_weights(self, x, y, key_mask, causal, segments):
        near = self.near_pairs(x, y, key_mask, causal, segments)
        return masked_softmax(x @ repeat_heads(y, x.shape[1]).mT, near)


register_mechanism("band", BandConfig, BandAttention)
