"""What every mechanism is: an `nn.Module` called on q, k, v, with a fast path and its naive definition."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..features import FeatureMap
from ..features.maps import RandomFeatures
from ..ops import State, Sums, causal_linear_attention, linear_attention, linear_multiply_adds
from ..ops.masks import unpack
from ..ops.naive import allowed_pairs, normalised_weights, repeat_heads
from ..ops.sharded import Part, part_of_causal_linear_attention, part_of_linear_attention
from .config import MechanismConfig


class Mechanism(nn.Module):
    """Base of all mechanisms: checks its inputs, computes in float32 (or more), and casts back.

    Subclasses define `attend` (fast), `dense_weights` (its naive definition), `new_state` and `attend_after` (the same
    token by token, for generation) and `multiply_adds`.
    """

    handles_cross_attention: ClassVar[bool] = True
    holds_all_keys: ClassVar[bool] = False  # in its state of generation, which then grows with the tokens
    needs_training: ClassVar[bool] = False  # in a pretrained model no better than averaging before: patch_model warns

    def __init__(
        self, config: MechanismConfig, *, num_heads: int, num_kv_heads: int, head_dim: int, seed: tuple[int, ...]
    ):
        super().__init__()
        self.config, self.num_heads, self.num_kv_heads, self.head_dim = config, num_heads, num_kv_heads, head_dim

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        key_mask: Tensor | None,
        causal: bool,
        segments: Tensor | None,
    ) -> Tensor:
        """Attention output `[B, H, Lq, D]`. When causal there are as many queries as keys; segments are causal."""
        raise NotImplementedError

    def attend_after(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, scale: float, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Causal attention of new tokens after those in `state`; and the new state, in which the old one is reused or
        not.
        """
        raise NotImplementedError

    def attend_part(self, q: Tensor, k: Tensor, v: Tensor, part: Part, *, scale: float, causal: bool) -> Tensor:
        """`attend` for one part of a sequence that is divided between processes; here, by gathering all of it."""
        q, k, v = (part.whole(x, 2) for x in (q, k, v))
        masks = {"key_mask": part.key_mask, "segments": part.segments}
        return part.own(self(q, k, v, causal=causal, scale=scale, **masks), 2)

    def gathers_sequence(self) -> bool:
        """Whether `attend_part` gathers the queries, keys and values of all parts, which costs memory and time."""
        return True

    def new_state(self, batch: int, value_dim: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """The state of generation before the first token. With `holds_all_keys` it takes one more argument, the number
        of tokens it has room for; without it, the state grows.
        """
        raise NotImplementedError

    def dense_weights(
        self, x: Tensor, y: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None
    ) -> Tensor:
        """The definition of `attend`: its weights as a dense matrix `[B, H, Lq, Lk]`; x and y carry the scale."""
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
        state: State | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """Attention of queries `[B, H, Lq, D]` over keys and values `[B, Hkv, Lk, D]` → `[B, H, Lq, Dv]`.

        `key_mask` `[B, Lk]`: True for keys that exist. `causal`: the last query stands at the last key. `scale`: of
        the scores, 1/sqrt(D) by default. `segments` `[B, L]`: numbers of packed sequences, each contiguous, that must
        not see each other.

        `state`, from `new_state`, makes these the next tokens of sequences whose past it holds, and takes them in, in
        place. However tokens are cut into calls, the outputs are those of one causal call over all of them. Gradients
        reach the new tokens, not the past.

        `part` says that q, k and v are one part of a sequence that is divided between processes, and has its masks.

        >>> from hf_rfattn import build_mechanism
        >>> mechanism = build_mechanism("favor+", num_heads=2, head_dim=8)
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> state = mechanism.new_state(1, 8, q.dtype, q.device)
        >>> steps = [mechanism(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state) for t in range(5)]
        >>> torch.allclose(torch.cat(steps, dim=2), mechanism(q, k, v, causal=True), atol=1e-5)
        True
        """
        _check_inputs(self, q, k, v, key_mask, causal or state is not None, scale, segments)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        key_mask = None if key_mask is None else key_mask.to(torch.bool)
        if q.numel() == 0 or k.numel() == 0:  # no sequences, or no tokens
            return (0 * q[..., :1]).expand(-1, -1, -1, v.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            if part is not None:
                return self.attend_part(q, k, v, part, scale=scale, causal=causal)
            if state is not None:
                if segments is not None:
                    raise ValueError("segments cannot go on from a state; give each packed sequence a row of its own.")
                past = state.map(torch.clone) if torch.is_grad_enabled() else state  # autograd keeps what it reads
                out, new = self.attend_after(q, k, v, past, scale=scale, key_mask=key_mask)
                state.copy_(new)
                return out
            if not causal and segments is not None:
                return self._attend_unpacked(q, k, v, scale, key_mask, segments)
            ahead = k.shape[2] - q.shape[2] if causal else 0
            if ahead:  # queries of the past were answered before: stand-ins keep positions aligned
                q = torch.cat([q.new_zeros(*q.shape[:2], ahead, q.shape[3]), q], dim=2)
            out = self.attend(q, k, v, scale=scale, key_mask=key_mask, causal=causal, segments=segments)
            return out[:, :, ahead:] if ahead else out

    def _attend_unpacked(
        self, q, k, v, scale: float, key_mask: Tensor | None, segments: Tensor, causal: bool = False
    ) -> Tensor:
        """Attention of packed sequences, each in a row of its own."""
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for group in unpack(segments):
            mask = group.inside if key_mask is None else group.inside & key_mask[group.row, group.position]
            part = self.attend(*map(group.take, (q, k, v)), scale=scale, key_mask=mask, causal=causal, segments=None)
            out = group.put(out, part)
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
        _check_inputs(self, q, k, k, key_mask, causal, scale, segments)
        root = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
        x, y = (z.to(torch.promote_types(z.dtype, torch.float32)) * root for z in (q, k))
        key_mask = None if key_mask is None else key_mask.to(torch.bool)
        with torch.autocast(q.device.type, enabled=False):
            return self.dense_weights(x, y, key_mask, causal, segments).to(q.dtype)


def _check_inputs(mechanism: Mechanism, q, k, v, key_mask, causal, scale, segments) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, not {scale!r}: features are of sqrt(scale) q and sqrt(scale) k.")
    expected = (mechanism.num_heads, mechanism.num_kv_heads, mechanism.num_kv_heads)
    for name, x, heads in zip("qkv", (q, k, v), expected, strict=True):
        if x.ndim != 4 or x.shape[1] != heads or (name != "v" and x.shape[3] != mechanism.head_dim):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; this {mechanism.config.name!r} mechanism was built for "
                f"[B, {heads}, L, {mechanism.head_dim}]."
            )
    q_length, k_length = q.shape[2], k.shape[2]
    if v.shape[2] != k_length:
        raise ValueError(f"There are {k_length} keys but {v.shape[2]} values.")
    if key_mask is not None and tuple(key_mask.shape) != (q.shape[0], k_length):
        raise ValueError(f"key_mask {tuple(key_mask.shape)} must have shape [B, Lk] = [{q.shape[0]}, {k_length}].")
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

    needs_training = True

    def __init__(self, config: MechanismConfig, feature_map: FeatureMap, **shape: Any):
        super().__init__(config, **shape)
        self.feature_map = feature_map

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        root = math.sqrt(scale)
        maps = self.feature_map("query", root), self.feature_map("key", root)
        if not causal:
            return linear_attention(q, k, v, *maps, key_mask)
        both = None if segments is None else (segments, segments)
        return causal_linear_attention(q, k, v, *maps, key_mask, both)[0]

    def attend_part(self, q, k, v, part, *, scale, causal):
        root = math.sqrt(scale)
        maps = self.feature_map("query", root), self.feature_map("key", root)
        if causal:
            return part_of_causal_linear_attention(q, k, v, *maps, part)[0]
        return part_of_linear_attention(q, k, v, *maps, part)

    def gathers_sequence(self):
        return False

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        root = math.sqrt(scale)
        maps = self.feature_map("query", root), self.feature_map("key", root)
        out, _, state = causal_linear_attention(q, k, v, *maps, key_mask, sums=state)
        return out, state

    def new_state(self, batch, value_dim, dtype, device):
        return Sums.of_none(self.feature_map("key"), (batch, self.num_kv_heads, value_dim), dtype, device)

    def dense_weights(self, x, y, key_mask, causal, segments):
        phi_q, phi_k = self.feature_map("query"), self.feature_map("key")
        q, k = phi_q.exactly(x), phi_k.exactly(y)
        scores = q.dense() @ repeat_heads(k.dense(), x.shape[1]).mT
        allowed = allowed_pairs(x.shape[2], y.shape[2], key_mask, causal, segments, device=x.device)
        floor = None
        if phi_q.floor is not None:  # a unit of weight
            floor = phi_q.floor.to(x).expand(self.num_kv_heads, 1, 1).repeat_interleave(x.shape[1] // y.shape[1], 0)
            floor = floor * torch.exp(q.log + repeat_heads(k.log, x.shape[1]).mT)
        return normalised_weights(scores, allowed, floor)

    def multiply_adds(self, length, causal):
        products = linear_multiply_adds(length, self.feature_map.num_features, self.head_dim, causal)
        return 2 * length * self.feature_map.multiply_adds() + products


def random_maps(module: nn.Module) -> list[RandomFeatures]:
    """All feature maps with a random draw inside a module."""
    return [m for m in module.modules() if isinstance(m, RandomFeatures)]
