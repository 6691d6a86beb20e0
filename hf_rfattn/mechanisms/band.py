"""A control: the near field alone, softmax over the keys within a band around the query.

out_i = softmax over |i - j| ≤ W of (x_iᵀy_j) · v_j, in O(L·W); the near field of FMMformer and the whole of
sliding-window attention.
"""

from dataclasses import dataclass

from torch import Tensor

from ..ops import Partial, attend_in_blocks, normalise
from ..ops.banded_attention import with_global_rows
from ..ops.naive import masked_softmax, repeat_heads
from .base import Mechanism
from .config import MechanismConfig, check_at_least
from .near_field import Window, global_part, near_multiply_adds, near_pairs
from .registry import register_mechanism


@dataclass(frozen=True)
class BandConfig(MechanismConfig):
    """Options of "band".

    `bandwidth`: keys at this distance or less are seen. `global_tokens`: so many tokens at the start of each sequence
    (and at its end, unless causal) are seen by every query, and see every key.
    """

    bandwidth: int = 32
    global_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")


class BandAttention(Mechanism):
    handles_cross_attention = False
    config: BandConfig

    def attend(self, inputs):
        config = self.config
        extra = global_part(inputs, config.global_tokens, config.bandwidth)
        out, _ = attend_in_blocks(inputs, _normalise_near, bandwidth=config.bandwidth, extra=extra)
        return with_global_rows(out, inputs, config.global_tokens)

    def new_state(self, batch, value_dim, dtype, device):
        return Window.new(self, self.config.bandwidth, self.config.global_tokens, batch, value_dim, dtype, device)

    def attend_after(self, inputs, state, fresh):
        window = Window(state, inputs, fresh, self.config.bandwidth, self.config.global_tokens)
        return window.attend(_normalise_near), window.new_state()

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        near = near_pairs(
            x.shape[2], y.shape[2], config.bandwidth, config.global_tokens, key_mask, causal, segments, x.device
        )
        return masked_softmax(x @ repeat_heads(y, x.shape[1]).transpose(-1, -2), near)

    def multiply_adds(self, length, causal):
        return near_multiply_adds(length, self.head_dim, self.config.bandwidth, self.config.global_tokens, causal)


def _normalise_near(parts: list[Partial], rows: slice) -> Tensor:
    return normalise(parts[0])


register_mechanism("band", BandConfig, BandAttention)
