"""The near field that "band" and "fmm" share: exact scores within a band, and to and from a few global tokens."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import (
    FarField,
    Inputs,
    Partial,
    State,
    allowed_pairs,
    attend_in_blocks,
    exact_attention,
    global_attention,
    merge,
    read_state,
)
from ..ops.banded_attention import global_keys
from .base import Mechanism


def global_part(inputs: Inputs, global_tokens: int, bandwidth: int) -> Partial | None:
    """Exact scores to the global tokens outside the band; None if there are none."""
    return global_attention(inputs, global_tokens, bandwidth) if global_tokens else None


def near_pairs(q_length, k_length, bandwidth, global_tokens, key_mask, causal, segments, device) -> Tensor:
    """The same keys as a dense mask: which pairs are scored exactly."""
    near = allowed_pairs(q_length, k_length, key_mask, causal, segments, bandwidth, device)
    if global_tokens:
        chosen = global_keys(k_length, global_tokens, key_mask, causal, segments, device)[:, None]
        keys, queries = chosen[:, :, None], chosen[..., None] & (not causal)
        near = near | ((keys | queries) & allowed_pairs(q_length, k_length, key_mask, causal, segments, None, device))
    return near


class Window:
    """The near field of new tokens in generation: the last W keys and values, and the global ones."""

    def __init__(self, state: dict[str, Tensor], inputs: Inputs, fresh: bool, bandwidth: int, global_tokens: int):
        self.bandwidth, self.global_tokens, self.fresh = bandwidth, global_tokens, fresh
        self.length, self.dtype = inputs.q.shape[2], inputs.q.dtype
        self.queries, y = (z.to(inputs.dtype) * inputs.root for z in (inputs.q, inputs.k))
        v, visible = inputs.v.to(inputs.dtype), inputs.key_mask
        if visible is None:
            visible = torch.ones(y.shape[0], self.length, dtype=torch.bool, device=y.device)
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

    def attend(
        self,
        finish: Callable[[list[Partial], slice], Tensor],
        far: Sequence[FarField] = (),
        states: Sequence[State] = (),
        held: Sequence[Tensor] = (),
    ) -> Tensor:
        """Attention of the new queries to window, new tokens and global keys; far fields take what has left the window,
        which is in `states`.
        """
        x = self.queries
        if self.length == 1 and not torch.is_grad_enabled():  # nothing leaves the window before it is read
            near = exact_attention(x, self.keys, self.values, self.visible[:, None])
            extra = self._global_part()
            parts = [near if extra is None else merge(near, extra)]
            parts += [read_state(f.queries(x, 1.0), s) for f, s in zip(far, states, strict=True)]
            return finish(parts, slice(0, 1)).to(self.dtype)
        # An empty window is left out; otherwise stand-ins for its queries let the new ones stand at their keys.
        skip = self.bandwidth if self.fresh else 0
        ahead = self.bandwidth - skip
        inputs = Inputs(
            F.pad(x, (0, 0, ahead, 0)), self.keys[:, :, skip:], self.values[:, :, skip:],
            key_mask=self.visible[:, skip:], causal=True,
        )  # fmt: skip
        extra = self._global_part()
        if extra is not None:
            fill = (0.0, 0.0, -torch.inf)
            extra = Partial(*(F.pad(z, (0, 0, ahead, 0), value=f) for z, f in zip(extra, fill, strict=True)))
        out, _ = attend_in_blocks(
            inputs,
            lambda parts, rows: finish(parts, slice(rows.start - ahead, rows.stop - ahead)),
            bandwidth=self.bandwidth,
            far=far,
            apart=True,
            far_mask=self.far[:, skip:],
            extra=extra,
            states=states,
            held=held,
        )
        return out[:, :, ahead:].to(self.dtype)

    def _global_part(self) -> Partial | None:
        if not self.global_tokens:
            return None
        filled = torch.arange(self.global_tokens, device=self.keys.device) < self.global_count  # [B, N]
        beyond = self.positions[:, :, None] - self.global_positions[:, None] > self.bandwidth  # [B, L, N]
        return exact_attention(self.queries, self.global_keys, self.global_values, filled[:, None] & beyond)

    def leaving(self) -> Inputs:
        """The keys that a far field takes over: they have left the window."""
        gone = slice(0, self.length)
        keys, values = self.keys[:, :, gone], self.values[:, :, gone]
        return Inputs(keys, keys, values, key_mask=self.far[:, gone])

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
    keys = min(length, sides * bandwidth + 1) + sides * global_tokens  # of each query
    rows = 0 if causal else min(length, sides * global_tokens)  # that see all keys
    return 2 * length * (keys + rows) * head_dim
