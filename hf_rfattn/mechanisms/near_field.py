"""The near field that "band" and "fmm" share: exact scores within a band and to a few global tokens."""

from typing import Any

import torch
from torch import Tensor

from ..ops import Partial, allowed_pairs, banded_attention, exact_attention, global_attention, merge
from ..ops.banded_attention import global_keys
from .base import Mechanism


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


class Window:
    """The near field of new tokens in generation: the last W keys and values, and the global ones."""

    def __init__(
        self,
        state: dict[str, Tensor],
        y: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        fresh: bool,
        bandwidth: int,
        global_tokens: int,
    ):
        self.bandwidth, self.global_tokens, self.fresh = bandwidth, global_tokens, fresh
        self.length = y.shape[2]
        visible = (
            torch.ones(y.shape[0], self.length, dtype=torch.bool, device=y.device) if key_mask is None else key_mask
        )
        # Window and new tokens together, `[B, Hkv, W + L, D]`: the first L of them leave the window.
        self.keys = torch.cat([state["window_keys"], y], dim=2)
        self.values = torch.cat([state["window_values"], v], dim=2)
        self.visible = torch.cat([state["window_visible"], visible], dim=1)
        if global_tokens:
            self._choose_global(state, y, v, visible)

    @staticmethod
    def new(
        mechanism: Mechanism,
        bandwidth: int,
        global_tokens: int,
        batch: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> dict[str, Tensor]:
        """The empty state."""
        heads, dim = mechanism.num_kv_heads, mechanism.head_dim
        state = {
            "window_keys": torch.zeros(batch, heads, bandwidth, dim, dtype=dtype, device=device),
            "window_values": torch.zeros(batch, heads, bandwidth, value_dim, dtype=dtype, device=device),
            "window_visible": torch.zeros(batch, bandwidth, dtype=torch.bool, device=device),
        }
        if global_tokens:
            state |= {
                "global_keys": torch.zeros(batch, heads, global_tokens, dim, dtype=dtype, device=device),
                "global_values": torch.zeros(batch, heads, global_tokens, value_dim, dtype=dtype, device=device),
                "global_positions": torch.zeros(batch, global_tokens, dtype=torch.long, device=device),
                "global_count": torch.zeros(batch, 1, dtype=torch.long, device=device),
                "window_global": torch.zeros(batch, bandwidth, dtype=torch.bool, device=device),
                "seen": torch.zeros(batch, 1, dtype=torch.long, device=device),
            }
        return state

    def _choose_global(self, state: dict[str, Tensor], y: Tensor, v: Tensor, visible: Tensor) -> None:
        """Put the first visible keys of each sequence into their slots, as they come."""
        rank = state["global_count"] + visible.long().cumsum(1) - visible.long()  # [B, L]
        chosen = visible & (rank < self.global_tokens)
        self.is_global = torch.cat([state["window_global"], chosen], dim=1)
        slots = torch.arange(self.global_tokens, device=y.device)
        place = (chosen[:, None] & (rank[:, None] == slots[:, None])).to(y.dtype)  # [B, N, L]
        self.positions = state["seen"] + torch.arange(self.length, device=y.device)  # [B, L]
        self.global_keys = state["global_keys"] + place[:, None] @ y
        self.global_values = state["global_values"] + place[:, None] @ v
        self.global_positions = state["global_positions"] + (place.long() * self.positions[:, None]).sum(-1)
        self.global_count = state["global_count"] + visible.long().sum(1, keepdim=True)

    def attend(self, x: Tensor) -> Partial:
        """Exact attention of the new queries `[B, H, L, D]` to window, new tokens and global keys."""
        if self.length == 1:
            band = exact_attention(x, self.keys, self.values, self.visible[:, None])
        elif self.fresh:
            keys, values = (z[:, :, self.bandwidth :] for z in (self.keys, self.values))
            band = banded_attention(
                x, keys, values, self.bandwidth, key_mask=self.visible[:, self.bandwidth :], causal=True
            )
        else:
            band = banded_attention(
                self.aligned(x), self.keys, self.values, self.bandwidth, key_mask=self.visible, causal=True
            )
            band = Partial(*(z[:, :, self.bandwidth :] for z in band))
        if not self.global_tokens:
            return band
        filled = torch.arange(self.global_tokens, device=x.device) < self.global_count  # [B, N]
        beyond = self.positions[:, :, None] - self.global_positions[:, None] > self.bandwidth  # [B, L, N]
        return merge(band, exact_attention(x, self.global_keys, self.global_values, filled[:, None] & beyond))

    def aligned(self, x: Tensor) -> Tensor:
        """Queries with stand-ins for those of the window, so that they stand at their keys."""
        return torch.cat([x.new_zeros(*x.shape[:2], self.bandwidth, x.shape[3]), x], dim=2)

    def new_state(self) -> dict[str, Tensor]:
        keep = slice(self.length, None)
        state = {
            "window_keys": self.keys[:, :, keep],
            "window_values": self.values[:, :, keep],
            "window_visible": self.visible[:, keep],
        }
        if self.global_tokens:
            state |= {
                "global_keys": self.global_keys,
                "global_values": self.global_values,
                "global_positions": self.global_positions,
                "global_count": self.global_count,
                "window_global": self.is_global[:, keep],
                "seen": self.positions[:, -1:] + 1,
            }
        return state

    @property
    def far(self) -> Tensor:
        """`[B, W + L]`, True for keys that a far field takes over once they have left the window."""
        return self.visible & ~self.is_global if self.global_tokens else self.visible


def near_multiply_adds(length: int, head_dim: int, bandwidth: int, global_tokens: int, causal: bool) -> int:
    """Multiply-adds of a near field for one query head."""
    sides = 1 if causal else 2
    keys = min(length, sides * bandwidth + 1) + sides * global_tokens
    return 2 * length * keys * head_dim
