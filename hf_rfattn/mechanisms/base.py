"""What every mechanism is: an `nn.Module` called on q, k, v, with a fast path and its naive definition."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..features import FeatureMap
from ..features.maps import RandomFeatures
from ..ops import (
    FarField,
    Inputs,
    Partial,
    State,
    add_key,
    allowed_pairs,
    attend_in_blocks,
    attend_to_all,
    attend_to_past,
    linear_multiply_adds,
    normalise,
    normalised_weights,
    read_state,
    visible_keys,
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

    def attend(self, inputs: Inputs) -> Tensor:
        """Attention output `[B, H, Lq, D]`; there are as many queries as keys when causal."""
        raise NotImplementedError

    def dense_weights(
        self, x: Tensor, y: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None
    ) -> Tensor:
        """The definition of `attend`: its weights as a dense matrix `[B, H, Lq, Lk]`; x and y carry the scale."""
        raise NotImplementedError

    def new_state(
        self, batch: int, value_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Tensors of a fixed size, the batch first, that hold all a causal query needs to know of the past."""
        raise NotImplementedError

    def attend_after(self, inputs: Inputs, state: dict[str, Tensor], fresh: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Causal attention of new tokens after those in `state`, which is `fresh` if empty; and the new state.

        Without gradients the tensors of `state` may be written to.
        """
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
        inputs = self._inputs(q, k, v, key_mask, causal, scale, segments)
        ahead = k.shape[2] - q.shape[2] if causal else 0
        if ahead:  # queries of the past were answered before: stand-ins keep positions aligned
            inputs = inputs._replace(q=torch.cat([q.new_zeros(*q.shape[:2], ahead, q.shape[3]), q], dim=2))
        with torch.autocast(q.device.type, enabled=False):
            return self.attend(inputs)[:, :, ahead:]

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

        However the tokens are cut into calls, the outputs are those of one call over all of them. `key_mask` `[B, L]`:
        of the new keys. `fresh`: promises an empty state and saves reading it.

        Gradients reach the new tokens, not the past.

        >>> from hf_rfattn import build_mechanism
        >>> mechanism = build_mechanism("favor+", num_heads=2, head_dim=8)
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> state = mechanism.new_state(1, 8, q.dtype, q.device)
        >>> steps = [mechanism.extend(*(x[:, :, t : t + 1] for x in (q, k, v)), state) for t in range(5)]
        >>> torch.allclose(torch.cat(steps, dim=2), mechanism(q, k, v, causal=True), atol=1e-5)
        True
        """
        inputs = self._inputs(q, k, v, key_mask, True, scale, None)
        with torch.autocast(q.device.type, enabled=False):
            # autograd keeps what it reads, and the state is about to be overwritten
            past = {name: value.clone() for name, value in state.items()} if torch.is_grad_enabled() else state
            out, new = self.attend_after(inputs, past, fresh)
        with torch.no_grad():
            for name, value in new.items():
                if value is not state[name]:
                    state[name].copy_(value)
        return out

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
        inputs = self._inputs(q, k, k, key_mask, causal, scale, segments)
        x, y = (z.to(inputs.dtype) * inputs.root for z in (q, k))
        with torch.autocast(q.device.type, enabled=False):
            return self.dense_weights(x, y, inputs.key_mask, causal, segments).to(q.dtype)

    def _inputs(self, q, k, v, key_mask, causal, scale, segments) -> Inputs:
        _check_inputs(self, q, k, v, key_mask, causal, segments)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not scale > 0:
            raise ValueError(f"scale must be positive, not {scale!r}: features are of sqrt(scale) q and sqrt(scale) k.")
        key_mask = None if key_mask is None else key_mask.to(torch.bool)
        return Inputs(q, k, v, math.sqrt(scale), key_mask, causal, segments)

    def held(self) -> list[Tensor]:
        """The parameters and buffers that attention reads."""
        return [*self.parameters(), *(b for b in self.buffers() if b.is_floating_point())]


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

    def far_field(self, joint: bool = False) -> FarField:
        """The feature map as the operators take it; `joint` if its products are added to something else."""
        phi = self.feature_map
        return FarField(
            queries=(lambda x, scale: phi(x, "query", scale)) if joint else phi.queries_of_a_quotient,
            keys=lambda y, scale: phi(y, "key", scale),
            num_features=phi.num_features,
            scales=phi.num_features if phi.scale_per_feature else 1,
        )

    def attend(self, inputs):
        if self.feature_map.scale_per_feature and not inputs.causal and inputs.segments is None:
            return attend_to_all(inputs, self.far_field(), self.held())
        if self.feature_map.scale_per_feature and inputs.causal:
            return attend_to_past(inputs, self.far_field(), held=self.held())[0]
        finish = self.normaliser(visible_keys(inputs) if not self.feature_map.positive else None)
        return attend_in_blocks(inputs, finish, far=[self.far_field()], held=self.held())[0]

    def normaliser(self, count: Tensor | None) -> Callable[[list[Partial], slice], Tensor]:
        """Divides, with the floor that signed maps need: `count` `[B, 1, L, 1]` are the keys each query sees."""

        def finish(parts: list[Partial], rows: slice) -> Tensor:
            floor = self.floor(parts[0].numerator)
            if floor is not None and count is not None:
                floor = floor * (count[:, :, rows] if count.shape[2] > 1 else count)
            return normalise(parts[0], floor)

        return finish

    def new_state(self, batch, value_dim, dtype, device):
        *_, features, scales = self.far_field()
        like = torch.empty((), dtype=dtype, device=device)
        shape = {"features": features, "scales": scales, "value_dim": value_dim}
        state = State.empty(batch, self.num_kv_heads, **shape, like=like)._asdict()
        if not self.feature_map.positive:  # for the floor of the denominator
            state["count"] = like.new_zeros(batch, 1, 1, 1)
        return state

    def attend_after(self, inputs, state, fresh):
        past = State(state["log_scale"], state["outer"], state["total"])
        new: dict[str, Tensor] = {}
        count = None
        if not self.feature_map.positive:
            count = state["count"] + visible_keys(inputs)
            new["count"] = count[:, :, -1:]
        finish = self.normaliser(count)
        if inputs.q.shape[2] == 1 and not torch.is_grad_enabled():
            x, y = (z.to(inputs.dtype) * inputs.root for z in (inputs.q, inputs.k))
            k = self.feature_map(y, "key")
            k = k if inputs.key_mask is None else k.only(inputs.key_mask[:, None, :, None])
            add_key(past, k, inputs.v.to(inputs.dtype))
            out = finish([read_state(self.feature_map.queries_of_a_quotient(x), past)], slice(0, 1)).to(inputs.q.dtype)
            return out, new | past._asdict()
        if self.feature_map.scale_per_feature:
            out, joined = attend_to_past(inputs, self.far_field(), None if fresh else past, self.held())
            return out, joined._asdict()
        states = None if fresh else [past]
        out, (joined,) = attend_in_blocks(inputs, finish, far=[self.far_field()], states=states, held=self.held())
        return out, new | joined._asdict()

    def dense_weights(self, x, y, key_mask, causal, segments):
        q, k = self.feature_map(x, "query"), self.feature_map(y, "key")
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
