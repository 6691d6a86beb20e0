"""The near field that "band" and "fmm" share: exact scores within a band, and to and from a few global tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import State, attend, banded_attention, global_attention, global_keys, merge
from ..ops.naive import allowed_pairs
from ..ops.softmax import bias_of


def near_attention(q, k, v, bandwidth: int, global_tokens: int, **masks) -> tuple[Tensor, Tensor]:
    """Attention over the band and the global keys, and its lse."""
    near = banded_attention(q, k, v, bandwidth, **masks)
    if not global_tokens:
        return near
    return merge(near, global_attention(q, k, v, global_tokens, bandwidth, **masks))


def near_pairs(q_length, k_length, bandwidth, global_tokens, key_mask, causal, segments, device) -> Tensor:
    """The same keys as a dense mask: which pairs are scored exactly."""
    near = allowed_pairs(q_length, k_length, key_mask, causal, segments, bandwidth, device)
    if global_tokens:
        chosen = global_keys(k_length, global_tokens, key_mask, causal, segments, device)[:, None]
        keys, queries = chosen[:, :, None], chosen[..., None] & (not causal)
        near = near | ((keys | queries) & allowed_pairs(q_length, k_length, key_mask, causal, segments, None, device))
    return near


@dataclass
class Globals(State):
    """The global keys of each sequence, N slots that fill up with its first visible keys."""

    keys: Tensor  # [B, Hkv, N, D]
    values: Tensor
    positions: Tensor  # [B, N]
    count: Tensor  # [B, 1], visible keys so far
    seen: Tensor  # [B, 1], positions so far
    in_window: Tensor  # [B, W + 1], keys of the window that are global

    def with_new(self, k: Tensor, v: Tensor, visible: Tensor) -> "Globals":
        """After new tokens; their part of `in_window` behind the old one."""
        rank = self.count + visible.long().cumsum(1) - visible.long()  # [B, L]
        slots = self.keys.shape[2]
        chosen = visible & (rank < slots)
        place = chosen[:, None] & (rank[:, None] == torch.arange(slots, device=k.device)[:, None])  # [B, N, L]
        positions = self.seen + torch.arange(k.shape[2], device=k.device)  # [B, L]
        one = place[:, None].to(k.dtype)
        return Globals(
            self.keys + one @ k,
            self.values + one @ v,
            self.positions + (place.long() * positions[:, None]).sum(-1),
            self.count + visible.long().sum(1, keepdim=True),
            positions[:, -1:] + 1,
            torch.cat([self.in_window, chosen], dim=1),
        )


@dataclass
class Window(State):
    """The near field of generation: the last W + 1 keys and values, and the global ones."""

    keys: Tensor  # [B, Hkv, W + 1, D]
    values: Tensor  # [B, Hkv, W + 1, Dv]
    visible: Tensor  # [B, W + 1]
    globals: Globals | None

    @staticmethod
    def new(batch: int, heads: int, head_dim: int, value_dim: int, bandwidth: int, global_tokens: int, like: Tensor):
        """The empty window, `like` a tensor in dtype and device."""
        width, count = bandwidth + 1, global_tokens
        zeros, long = like.new_zeros, torch.long
        chosen = None
        if count:
            chosen = Globals(
                zeros(batch, heads, count, head_dim),
                zeros(batch, heads, count, value_dim),
                zeros(batch, count, dtype=long),
                zeros(batch, 1, dtype=long),
                zeros(batch, 1, dtype=long),
                zeros(batch, width, dtype=torch.bool),
            )
        return Window(
            zeros(batch, heads, width, head_dim),
            zeros(batch, heads, width, value_dim),
            zeros(batch, width, dtype=torch.bool),
            chosen,
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], "Window"]:
        """Attention of new tokens to the near field, with its lse; what leaves the window by then, keys, values and
        which of them a far field takes over; and the new window.

        New query i sees, through the far field, the first i + 1 of what leaves.
        """
        dtype, length, bandwidth = self.keys.dtype, k.shape[2], self.keys.shape[2] - 1
        q, k, v = (x.to(dtype) for x in (q, k, v))
        new = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        keys, values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        visible = torch.cat([self.visible, new], dim=1)
        if length == 1:  # all but the first are in its band
            near = attend(q, keys[:, :, 1:], values[:, :, 1:], bias_of(visible[:, None, None, 1:], dtype), scale)
        else:
            near = banded_attention(q, keys, values, bandwidth, scale=scale, key_mask=visible, causal=True)
        far, chosen = visible, None
        if self.globals is not None:
            chosen = self.globals.with_new(k, v, new)
            far = visible & ~chosen.in_window
            chosen.in_window = chosen.in_window[:, length:]
            filled = torch.arange(chosen.keys.shape[2], device=k.device) < chosen.count  # [B, N]
            positions = self.globals.seen + torch.arange(length, device=k.device)
            beyond = positions[:, :, None] - chosen.positions[:, None] > bandwidth  # [B, L, N]
            bias = bias_of((filled[:, None] & beyond)[:, None], dtype)
            near = merge(near, attend(q, chosen.keys, chosen.values, bias, scale))
        gone, kept = slice(0, length), slice(length, None)
        window = Window(keys[:, :, kept], values[:, :, kept], visible[:, kept], chosen)
        return near, (keys[:, :, gone], values[:, :, gone], far[:, gone]), window


def near_multiply_adds(length: int, head_dim: int, bandwidth: int, global_tokens: int, causal: bool) -> int:
    """Multiply-adds of a near field for one query head."""
    sides = 1 if causal else 2
    keys = min(length, sides * bandwidth + 1) + sides * global_tokens  # of each query
    rows = 0 if causal else min(length, sides * global_tokens)  # that see all keys
    return 2 * length * (keys + rows) * head_dim
