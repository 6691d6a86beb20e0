"""A control: the near field alone, softmax over the keys within a band around the query.

out_i = softmax over |i - j| ≤ W of (x_iᵀy_j) · v_j, in O(L·W); the near field of FMMformer and the whole of sliding-window attention.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ops import Partial, allowed_pairs, banded_attention, global_attention, merge, normalise
from ..ops.banded_attention import global_keys
from ..ops.naive import masked_softmax, repeat_heads
from .base import Mechanism, MechanismConfig, check_at_least, register_mechanism


@dataclass(frozen=True)
class BandConfig(MechanismConfig):
    """Options of "band".

    `bandwidth`: keys at this distance or less are seen. `global_tokens`: so many keys at the start of each sequence (and at its end, unless causal)
    are seen by every query.
    """

    bandwidth: int = 32
    global_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")


class BandAttention(Mechanism):
    handles_cross_attention = False
    config: BandConfig

    def attend(self, x, y, v, key_mask, causal, segments):
        return normalise(near_field(x, y, v, self.config.bandwidth, self.config.global_tokens, key_mask, causal, segments))

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        near = near_pairs(x.shape[2], y.shape[2], config.bandwidth, config.global_tokens, key_mask, causal, segments, x.device)
        return masked_softmax(x @ repeat_heads(y, x.shape[1]).transpose(-1, -2), near)

    def multiply_adds(self, length, causal):
        return near_multiply_adds(length, self.head_dim, self.config.bandwidth, self.config.global_tokens, causal)


def near_field(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    bandwidth: int,
    global_tokens: int,
    key_mask: Tensor | None,
    causal: bool,
    segments: Tensor | None,
) -> Partial:
    """Exact scores within the band and to the global tokens."""
    masks: dict[str, Any] = {"key_mask": key_mask, "causal": causal, "segments": segments}
    band = banded_attention(x, y, v, bandwidth, **masks)
    if not global_tokens:
        return band
    return merge(band, global_attention(x, y, v, global_tokens, bandwidth, **masks))


def near_pairs(q_length, k_length, bandwidth, global_tokens, key_mask, causal, segments, device) -> Tensor:
    """The same keys as a dense mask: which pairs are scored exactly."""
    near = allowed_pairs(q_length, k_length, key_mask, causal, segments, bandwidth, device)
    if global_tokens:
        chosen = global_keys(k_length, global_tokens, key_mask, causal, segments, device)[:, None, None, :]
        near = near | (chosen & allowed_pairs(q_length, k_length, key_mask, causal, segments, None, device))
    return near


def near_multiply_adds(length: int, head_dim: int, bandwidth: int, global_tokens: int, causal: bool) -> int:
    """Multiply-adds of a near field for one query head."""
    sides = 1 if causal else 2
    keys = min(length, sides * bandwidth + 1) + sides * global_tokens
    return 2 * length * keys * head_dim


register_mechanism("band", BandConfig, BandAttention)
