"""What every mechanism is: an `nn.Module` called on q, k, v, with a fast path and its naive definition."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..features import FeatureMap
from ..features.maps import RandomFeatures
from ..ops import (
    Features,
    State,
    allowed_pairs,
    combine,
    linear_attention,
    linear_multiply_adds,
    merge,
    normalise,
    normalised_weights,
    read_state,
    summarise,
)
from ..ops.naive import repeat_heads
from .config import MechanismConfig


class Mechanism(nn.Module):
    """Base of all mechanisms: checks and scales its inputs, computes in float32 (or more), and casts back.

    Subclasses define `attend` (fast), `dense_weights` (its naive definition), `new_state` and `attend_after` (the same
    token by token, for generation) and `multiply_adds`.
    """

    handles_cross_attention: ClassVar[bool] = True

    def __init__(
        self, config: MechanismConfig, *, num_heads: int, num_kv_heads: int, head_dim: int, seed: tuple[int, ...]
    ):
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.seed = seed

    def attend(
        self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None
    ) -> Tensor:
        """Attention output `[B, H, L, D]` for scaled queries x and keys y of one length when causal."""
        raise NotImplementedError

    def dense_weights(
        self, x: Tensor, y: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None
    ) -> Tensor:
        """The definition of `attend`: its weights as a dense matrix `[B, H, Lq, Lk]`."""
        raise NotImplementedError

    def new_state(
        self, batch: int, value_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Tensors of a fixed size, the batch first, that hold all a causal query needs to know of the past."""
        raise NotImplementedError

    def attend_after(
        self, x: Tensor, y: Tensor, v: Tensor, key_mask: Tensor | None, state: dict[str, Tensor], fresh: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Causal attention of new tokens after those in `state`, which is `fresh` if empty; and the new state."""
        raise NotImplementedError

    def multiply_adds(self, length: int, causal: bool) -> int:
        """Multiply-adds a query head spends on `length` tokens (softmax: 2 · length² · head_dim, half if causal)."""
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """Length of φ, all far-field maps together; 0 for a mechanism without one."""
        return sum(m.num_features for m in self.modules() if isinstance(m, FeatureMap))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries `[B, H, Lq, D]` over keys and values `[B, Hkv, Lk, D]` → `[B, H, Lq, Dv]`.

        `key_mask` `[B, Lk]`: True for keys that exist. `causal`: the last query stands at the last key. `scale`: of
        the scores, 1/sqrt(D) by default. `segments` `[B, L]`: numbers of packed sequences, each contiguous, that must
        not see each other.
        """
        x, y, v, key_mask, segments = self._prepare(q, k, v, key_mask, causal, scale, segments)
        ahead = y.shape[2] - x.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            if causal and ahead:  # queries of the past were answered before: stand-ins keep positions aligned
                x = torch.cat([x.new_zeros(*x.shape[:2], ahead, x.shape[3]), x], dim=2)
            out = self.attend(x, y, v, key_mask, causal, segments)
            if causal and ahead:
                out = out[:, :, ahead:]
        return out.to(q.dtype)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: dict[str, Tensor],
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        fresh: bool = False,
    ) -> Tensor:
        """Causal attention of the next tokens of sequences whose past is in `state`, which is updated in place.

        However the tokens are cut into calls, the outputs are those of one call over all of them. `key_mask` `[B, L]`
        is of the new keys. `fresh` promises an empty state and saves reading it. Gradients reach the new tokens, not
        the past.

        >>> from hf_rfattn import build_mechanism
        >>> mechanism = build_mechanism("favor+", num_heads=2, head_dim=8)
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> state = mechanism.new_state(1, 8, q.dtype, q.device)
        >>> steps = [mechanism.extend(*(x[:, :, t : t + 1] for x in (q, k, v)), state) for t in range(5)]
        >>> torch.allclose(torch.cat(steps, dim=2), mechanism(q, k, v, causal=True), atol=1e-5)
        True
        """
        x, y, v, key_mask, _ = self._prepare(q, k, v, key_mask, True, scale, None)
        with torch.autocast(q.device.type, enabled=False):
            # autograd keeps what it reads, and the state is about to be overwritten
            past = {name: value.clone() for name, value in state.items()} if torch.is_grad_enabled() else state
            out, new = self.attend_after(x, y, v, key_mask, past, fresh)
        with torch.no_grad():
            for name, value in new.items():
                state[name].copy_(value)
        return out.to(q.dtype)

    def attention_weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        key_mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The same attention as a dense matrix `[B, H, Lq, Lk]`, quadratic: to look at, to test against."""
        x, y, _, key_mask, segments = self._prepare(q, k, k, key_mask, causal, scale, segments)
        with torch.autocast(q.device.type, enabled=False):
            return self.dense_weights(x, y, key_mask, causal, segments).to(q.dtype)

    def _prepare(self, q, k, v, key_mask, causal, scale, segments):
        _check_inputs(self, q, k, v, key_mask, causal, segments)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not scale > 0:
            raise ValueError(f"scale must be positive, not {scale!r}: features are of sqrt(scale) q and sqrt(scale) k.")
        dtype = torch.promote_types(q.dtype, torch.float32)
        root = math.sqrt(scale)
        key_mask = None if key_mask is None else key_mask.to(torch.bool)
        return q.to(dtype) * root, k.to(dtype) * root, v.to(dtype), key_mask, segments


def _check_inputs(mechanism: Mechanism, q, k, v, key_mask, causal, segments) -> None:
    expected = (mechanism.num_heads, mechanism.num_kv_heads, mechanism.num_kv_heads)
    for name, x, heads in zip("qkv", (q, k, v), expected, strict=True):
        if x.ndim != 4 or x.shape[1] != heads or (name != "v" and x.shape[3] != mechanism.head_dim):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; this {mechanism.config.name!r} mechanism was built for "
                f"[B, {heads}, L, {mechanism.head_dim}] (num_heads={mechanism.num_heads}, "
                f"num_kv_heads={mechanism.num_kv_heads}, head_dim={mechanism.head_dim})."
            )
    q_length, k_length = q.shape[2], k.shape[2]
    if v.shape[2] != k_length:
        raise ValueError(f"There are {k_length} keys but {v.shape[2]} values.")
    if key_mask is not None and tuple(key_mask.shape) != (q.shape[0], k_length):
        raise ValueError(
            f"key_mask has shape {tuple(key_mask.shape)}; it must be [B, Lk] = [{q.shape[0]}, {k_length}]."
        )
    if segments is not None and (q_length != k_length or tuple(segments.shape) != (q.shape[0], k_length)):
        raise ValueError(f"segments {tuple(segments.shape)} need as many queries as keys, shape [B, L].")
    if causal and q_length > k_length:
        raise ValueError(f"Causal attention of {q_length} queries needs at least as many keys, not {k_length}.")
    if not causal and q_length != k_length and not mechanism.handles_cross_attention:
        raise ValueError(
            f"{mechanism.config.name!r} has a band around the diagonal, which means nothing between {q_length} "
            f"queries and {k_length} keys."
        )


class LinearMechanism(Mechanism):
    """Linear attention with a feature map; subclasses only build the map."""

    def __init__(self, config: MechanismConfig, feature_map: FeatureMap, **shape: Any):
        super().__init__(config, **shape)
        self.feature_map = feature_map

    def features(self, x: Tensor, y: Tensor) -> tuple[Features, Features]:
        return self.feature_map(x, "query"), self.feature_map(y, "key")

    def attend(self, x, y, v, key_mask, causal, segments):
        q, k = self.features(x, y)
        masks: dict[str, Any] = {"key_mask": key_mask, "causal": causal, "segments": segments}
        floor = self.floor(x)
        if floor is not None:  # times the number of visible keys
            ones = Features(torch.zeros_like(y[..., :1]))
            ones_q = Features(torch.zeros_like(x[..., :1]))
            floor = floor * linear_attention(ones_q, ones, v[..., :1], **masks).denominator
        return normalise(linear_attention(q, k, v, **masks), floor)

    def new_state(self, batch, value_dim, dtype, device):
        features, kv_heads = self.feature_map.num_features, self.num_kv_heads
        scales = features if self.feature_map.scale_per_feature else 1
        state = {
            "log_scale": torch.full((batch, kv_heads, 1, scales), -torch.inf, dtype=dtype, device=device),
            "outer": torch.zeros(batch, kv_heads, features, value_dim, dtype=dtype, device=device),
            "total": torch.zeros(batch, kv_heads, features, 1, dtype=dtype, device=device),
        }
        if not self.feature_map.positive:  # for the floor of the denominator
            state["count"] = torch.zeros(batch, 1, 1, 1, dtype=dtype, device=device)
        return state

    def attend_after(self, x, y, v, key_mask, state, fresh):
        q, k = self.features(x, y)
        past = State(state["log_scale"], state["outer"], state["total"])
        joined = combine(past, summarise(k, v, key_mask))
        if x.shape[2] == 1 and not (torch.is_grad_enabled() and x.requires_grad):
            part = read_state(q, joined)  # the one new key is visible to the one new query
        else:
            part = linear_attention(q, k, v, key_mask=key_mask, causal=True)
            part = part if fresh else merge(part, read_state(q, past))
        new = joined._asdict()
        floor = self.floor(x)
        if floor is not None:
            visible = torch.ones_like(x[:, :1, :, :1]) if key_mask is None else key_mask[:, None, :, None].to(x.dtype)
            count = state["count"] + visible.cumsum(2)
            floor = floor * count
            new["count"] = count[:, :, -1:]
        return normalise(part, floor), new

    def dense_weights(self, x, y, key_mask, causal, segments):
        q, k = self.features(x, y)
        scores = q.dense() @ repeat_heads(k.dense(), x.shape[1]).transpose(-1, -2)
        allowed = allowed_pairs(x.shape[2], y.shape[2], key_mask, causal, segments, device=x.device)
        return normalised_weights(scores, allowed, self.floor(x))

    def floor(self, x: Tensor) -> Tensor | None:
        """The feature map's floor of the denominator for each query head, `[H, 1, 1]`, like x in dtype and device."""
        floor = self.feature_map.floor()
        if floor is None:
            return None
        per_head = torch.as_tensor(floor, dtype=x.dtype, device=x.device).reshape(-1)
        return per_head.repeat_interleave(self.num_heads // len(per_head))[:, None, None]

    def multiply_adds(self, length, causal):
        return self.far_multiply_adds(length, causal)

    def far_multiply_adds(self, length: int, causal: bool, outside: int | None = None) -> int:
        """The same where a near field takes the keys at distance `outside` or less."""
        products = linear_multiply_adds(length, self.feature_map.num_features, self.head_dim, causal, outside)
        return 2 * length * self.feature_map.multiply_adds() + products


def random_maps(module: nn.Module) -> list[RandomFeatures]:
    """All feature maps with a random draw inside a module."""
    return [m for m in module.modules() if isinstance(m, RandomFeatures)]
