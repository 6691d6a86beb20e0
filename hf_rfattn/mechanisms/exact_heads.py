"""Exact softmax in some heads of a layer, and linear attention in the others.

A few heads of a model, for example those that match single tokens, are hard to approximate and matter most.
`hf_rfattn.convert` and `hf_rfattn.keep_exact_heads` find them. The cost is quadratic, but only in these heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import State, Sums, softmax_attention
from ..ops.linear import compute_dtype
from ..ops.multipole_causal import Context
from ..ops.naive import allowed_pairs, masked_softmax
from ..ops.softmax import attend
from .base import LinearMechanism, Mechanism
from .config import MechanismConfig, option
from .registry import mechanism_class, register_mechanism, resolve_config

BLOCK = 64  # tokens by which the cache grows
MOST_SCORES = 2**24  # of one head that exist at a time in generation


@dataclass(frozen=True)
class ExactHeadsConfig(MechanismConfig):
    """Options of "exact_heads"."""

    heads: tuple[int, ...] = option((0,), "Numbers of the query heads that keep exact softmax.")
    rest: str | MechanismConfig = option("hedgehog", "Linear mechanism of the other heads, a name or a config.")

    def __post_init__(self) -> None:
        if isinstance(self.heads, list):
            object.__setattr__(self, "heads", tuple(self.heads))
        super().__post_init__()
        if not self.heads or min(self.heads) < 0 or len(set(self.heads)) < len(self.heads):
            raise ValueError(
                f"heads must list at least one head, each once, by its number from 0 on, not {self.heads!r}."
            )
        if not issubclass(mechanism_class(resolve_config(self.rest)), LinearMechanism):
            raise ValueError(f"rest must be a linear mechanism such as 'hedgehog' or 'favor+', not {self.rest!r}.")


@dataclass
class ExactHeadsState(State):
    """Sums of the linear mechanism, and the keys and values of the exact heads."""

    rest: Sums
    exact: Context


class ExactHeadsAttention(Mechanism):
    config: ExactHeadsConfig
    rest: LinearMechanism
    holds_all_keys = True
    needs_training = True

    def __init__(self, config: ExactHeadsConfig, *, seed: tuple[int, ...], **shape: Any):
        super().__init__(config, seed=seed, **shape)
        if max(config.heads) >= self.num_heads:
            raise ValueError(f"heads={config.heads}: this layer has heads 0 to {self.num_heads - 1}.")
        rest = resolve_config(config.rest)
        self.rest = mechanism_class(rest)(rest, seed=(*seed, 0), **shape)  # type: ignore[assignment]

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the exact heads, as many of each."""
        group = self.num_heads // self.num_kv_heads
        kv = [head // group for head in self.config.heads]
        return q[:, list(self.config.heads)], k[:, kv], v[:, kv]

    def _put(self, out: Tensor, exact: Tensor) -> Tensor:
        """Replace the outputs of the exact heads."""
        heads = torch.tensor(self.config.heads, device=out.device)
        return out.index_copy(1, heads, exact.to(out.dtype))

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        masks = {"scale": scale, "key_mask": key_mask, "causal": causal, "segments": segments}
        return self._put(self.rest.attend(q, k, v, **masks), softmax_attention(*self._exact(q, k, v), **masks))

    def new_state(self, batch, value_dim, dtype, device, length=0):
        exact = torch.promote_types(dtype, torch.float32)
        like = torch.empty((), dtype=dtype, device=device)
        sizes = len(self.config.heads), self.head_dim, value_dim, length, BLOCK, like
        rest = self.rest.new_state(batch, value_dim, exact, device)
        return ExactHeadsState(rest, Context.new(batch, *sizes, fixed=length > 0))

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        out, rest = self.rest.attend_after(q, k, v, state.rest, scale=scale, key_mask=key_mask)
        queries, new_keys, new_values = self._exact(q, k, v)
        context, last = state.exact.extended(new_keys, new_values, key_mask)
        queries, keys, values = (x.to(compute_dtype(q)) for x in (queries, context.keys, context.values))
        places = torch.arange(keys.shape[2], device=keys.device)
        parts = []
        for rows in range(0, queries.shape[2], max(1, MOST_SCORES // keys.shape[2])):
            some = slice(rows, rows + max(1, MOST_SCORES // keys.shape[2]))
            hidden = places > last[:, None, some, None]  # [B or 1, 1, L, S]
            bias = torch.zeros_like(hidden, dtype=queries.dtype).masked_fill(hidden, -torch.inf)
            parts.append(attend(queries[:, :, some], keys, values, bias, scale)[0])
        return self._put(out, torch.cat(parts, dim=2)), ExactHeadsState(rest, context)

    def dense_weights(self, x, y, key_mask, causal, segments):
        allowed = allowed_pairs(x.shape[2], y.shape[2], key_mask, causal, segments, device=x.device)
        queries, keys, _ = self._exact(x, y, y)
        exact = masked_softmax(queries @ keys.mT, allowed)
        return self._put(self.rest.dense_weights(x, y, key_mask, causal, segments), exact)

    def multiply_adds(self, length, causal):
        exact = length * (length + 1 if causal else 2 * length) * self.head_dim
        return self.rest.multiply_adds(length, causal) + exact * len(self.config.heads) // self.num_heads


register_mechanism("exact_heads", ExactHeadsConfig, ExactHeadsAttention)
