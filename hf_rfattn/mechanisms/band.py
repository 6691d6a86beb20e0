"""A control: the near field alone, softmax over the keys within a band around the query.

out_i = softmax over |i - j| ≤ W of (x_iᵀy_j) · v_j, in O(L·W); the near field of FMMformer and the whole of
sliding-window attention.
"""

from dataclasses import dataclass

import torch
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

    bandwidth: int = option(64, "A query sees the keys at this distance or less.")
    global_tokens: int = option(
        1, "Number of tokens at the start of a sequence (and at its end, unless causal) that see and are seen by all."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")


def near_attention(q, k, v, bandwidth: int, global_tokens: int, **masks) -> tuple[Tensor, Tensor]:
    """Attention over the band and the global keys, and its lse."""
    near = banded_attention(q, k, v, bandwidth, **masks)
    if not global_tokens:
        return near
    return merge(near, global_attention(q, k, v, global_tokens, bandwidth, **masks))


def near_attention_of_part(q, k, v, bandwidth, global_tokens, part: Part, scale, causal) -> tuple[Tensor, Tensor]:
    """The same for the queries of a part."""
    near = part_of_banded_attention(q, k, v, bandwidth, part, scale=scale, causal=causal)
    if not global_tokens:
        return near
    return merge(near, part_of_global_attention(q, k, v, global_tokens, bandwidth, part, scale=scale, causal=causal))


def near_pairs(q_length, k_length, bandwidth, global_tokens, key_mask, causal, segments, device) -> Tensor:
    """The same keys as a dense mask: which pairs are scored exactly."""
    near = allowed_pairs(q_length, k_length, key_mask, causal, segments, bandwidth, device)
    if global_tokens:
        chosen = global_keys(k_length, global_tokens, key_mask, causal, segments, device)[:, None]
        keys, queries = chosen[:, :, None], chosen[..., None] & (not causal)
        near = near | ((keys | queries) & allowed_pairs(q_length, k_length, key_mask, causal, segments, None, device))
    return near


def near_multiply_adds(length: int, head_dim: int, bandwidth: int, global_tokens: int, causal: bool) -> int:
    """Multiply-adds of a near field for one query head."""
    sides = 1 if causal else 2
    keys = min(length, sides * bandwidth + 1) + sides * global_tokens  # of each query
    rows = 0 if causal else min(length, sides * global_tokens)  # that see all keys
    return 2 * length * (keys + rows) * head_dim


class BandAttention(Mechanism):
    handles_cross_attention = False
    config: BandConfig

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        count = self.config.global_tokens
        masks = {"scale": scale, "key_mask": key_mask, "causal": causal, "segments": segments}
        out = near_attention(q, k, v, self.config.bandwidth, count, **masks)[0].to(q.dtype)
        return with_global_rows(out, q, k, v, count, scale=scale, key_mask=key_mask) if count and not causal else out

    def attend_part(self, q, k, v, part, *, scale, causal):
        count = self.config.global_tokens
        out = near_attention_of_part(q, k, v, self.config.bandwidth, count, part, scale, causal)[0].to(q.dtype)
        return part_with_global_rows(out, q, k, v, count, part, scale=scale) if count and not causal else out

    def gathers_sequence(self):
        return False

    def new_state(self, batch, value_dim, dtype, device):
        like = torch.empty((), dtype=dtype, device=device)
        sizes = batch, self.num_kv_heads, self.head_dim, value_dim
        return Window.new(*sizes, self.config.bandwidth, self.config.global_tokens, like)

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        (out, _), _, window = state.attend(q, k, v, scale, key_mask)
        return out.to(q.dtype), window

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        near = near_pairs(
            x.shape[2], y.shape[2], config.bandwidth, config.global_tokens, key_mask, causal, segments, x.device
        )
        return masked_softmax(x @ repeat_heads(y, x.shape[1]).transpose(-1, -2), near)

    def multiply_adds(self, length, causal):
        return near_multiply_adds(length, self.head_dim, self.config.bandwidth, self.config.global_tokens, causal)


register_mechanism("band", BandConfig, BandAttention)
