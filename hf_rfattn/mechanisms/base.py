"""Base classes of mechanisms: an `nn.Module` called on q, k, v, with a fast implementation and a dense definition."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..features import FeatureMap
from ..features.maps import RandomFeatures
from ..ops import FeatureFunction, State, Sums, causal_linear_attention, linear_attention, linear_multiply_adds
from ..ops.masks import unpack
from ..ops.naive import allowed_pairs, normalised_weights, repeat_heads
from ..ops.sharded import Part, part_of_causal_linear_attention, part_of_linear_attention
from .config import MechanismConfig


class Mechanism(nn.Module):
    """Base class of all mechanisms. Checks the inputs, computes in float32 or higher precision, and casts back.

    Subclasses define `attend` (the fast implementation), `dense_weights` (its definition as a dense matrix),
    `new_state` and `attend_after` (token by token, for generation) and `multiply_adds`.
    """

    handles_cross_attention: ClassVar[bool] = True
    holds_all_keys: ClassVar[bool] = False  # the generation state keeps all keys, so it grows with the sequence
    needs_training: ClassVar[bool] = False  # no better than averaging in a pretrained model: patch_model warns

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
        """Compute the attention output `[B, H, Lq, D]`. If causal, Lq = Lk; `segments` are given only if causal."""
        raise NotImplementedError

    def attend_after(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, *, scale: float, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Compute causal attention of the tokens that follow `state`. Returns the output and the new state, which may
        reuse the tensors of the old one.
        """
        raise NotImplementedError

    def attend_part(self, q: Tensor, k: Tensor, v: Tensor, part: Part, *, scale: float, causal: bool) -> Tensor:
        """Compute `attend` for this process's part of a sharded sequence. The default gathers the whole sequence."""
        q, k, v = (part.whole(x, 2) for x in (q, k, v))
        masks = {"key_mask": part.key_mask, "segments": part.segments}
        return part.own(self(q, k, v, causal=causal, scale=scale, **masks), 2)

    def gathers_sequence(self) -> bool:
        """Whether `attend_part` gathers the queries, keys and values of all processes, which costs memory and time."""
        return type(self).attend_part is Mechanism.attend_part

    def new_state(self, batch: int, value_dim: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """Create the generation state before the first token. If `holds_all_keys`, there is one more argument: the
        number of tokens to allocate, or 0 for a state that grows.
        """
        raise NotImplementedError

    def dense_weights(
        self, x: Tensor, y: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None
    ) -> Tensor:
        """Define `attend` by its dense matrix of weights `[B, H, Lq, Lk]`. x and y are q and k times sqrt(scale)."""
        raise NotImplementedError

    def multiply_adds(self, length: int, causal: bool) -> int:
        """Multiply-adds per query head for `length` tokens (softmax: 2 · length² · head_dim, half of it if causal)."""
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """Total number of features of all feature maps; 0 for a mechanism without any."""
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

        `key_mask` `[B, Lk]`: True for keys that are not padding. `causal`: the last query is aligned with the last
        key. `scale`: of the scores, 1/sqrt(D) by default. `segments` `[B, L]`: index of the packed sequence that each
        token belongs to; sequences are contiguous and do not attend to each other.

        `state`: the past of these sequences, for generation, created by `new_state` and updated in place. Calls on
        successive chunks of tokens give the same outputs as one causal call on all of them. Gradients flow to the new
        tokens only.

        `part`: q, k and v are this process's part of a sharded sequence, whose masks `part` contains.

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
                    raise ValueError("segments cannot be combined with a state; put each sequence in its own row.")
                past = state.map(torch.clone) if torch.is_grad_enabled() else state  # autograd saves these tensors
                out, new = self.attend_after(q, k, v, past, scale=scale, key_mask=key_mask)
                state.copy_(new)
                return out
            if not causal and segments is not None:
                return self._attend_unpacked(q, k, v, scale, key_mask, segments)
            ahead = k.shape[2] - q.shape[2] if causal else 0
            if ahead:  # zeros instead of past queries keep queries and keys aligned
                q = torch.cat([q.new_zeros(*q.shape[:2], ahead, q.shape[3]), q], dim=2)
            out = self.attend(q, k, v, scale=scale, key_mask=key_mask, causal=causal, segments=segments)
            return out[:, :, ahead:] if ahead else out

    def _attend_unpacked(
        self, q, k, v, scale: float, key_mask: Tensor | None, segments: Tensor, causal: bool = False
    ) -> Tensor:
        """Attention of packed sequences, unpacked to one row each."""
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
        """Return the weights of this attention as a dense matrix `[B, H, Lq, Lk]`, for inspection and tests.

        Memory and time are quadratic in the length.
        """
        _check_inputs(self, q, k, k, key_mask, causal, scale, segments)
        root = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
        x, y = (z.to(torch.promote_types(z.dtype, torch.float32)) * root for z in (q, k))
        key_mask = None if key_mask is None else key_mask.to(torch.bool)
        with torch.autocast(q.device.type, enabled=False):
            return self.dense_weights(x, y, key_mask, causal, segments).to(q.dtype)


def _check_inputs(mechanism: Mechanism, q, k, v, key_mask, causal, scale, segments) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, not {scale!r}: q and k are multiplied by its square root.")
    expected = (mechanism.num_heads, mechanism.num_kv_heads, mechanism.num_kv_heads)
    for name, x, heads in zip("qkv", (q, k, v), expected, strict=True):
        if x.ndim != 4 or x.shape[1] != heads or (name != "v" and x.shape[3] != mechanism.head_dim):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; this {mechanism.config.name!r} mechanism was built for "
                f"[B, {heads}, L, {mechanism.head_dim}]."
            )
    q_length, k_length = q.shape[2], k.shape[2]
    if v.shape[2] != k_length:
        raise ValueError(f"k has {k_length} tokens but v has {v.shape[2]}; they must be equal.")
    if key_mask is not None and tuple(key_mask.shape) != (q.shape[0], k_length):
        raise ValueError(f"key_mask has shape {tuple(key_mask.shape)}; expected [B, Lk] = [{q.shape[0]}, {k_length}].")
    if segments is not None and (q_length != k_length or tuple(segments.shape) != (q.shape[0], k_length)):
        raise ValueError(
            f"segments has shape {tuple(segments.shape)} for {q_length} queries and {k_length} keys; expected [B, L] "
            "and as many queries as keys."
        )
    if causal and q_length > k_length:
        raise ValueError(f"Causal attention needs at least as many keys as queries; got {k_length} and {q_length}.")
    if not causal and q_length != k_length and not mechanism.handles_cross_attention:
        raise ValueError(
            f"{mechanism.config.name!r} attends to a band around the diagonal, so it needs as many keys as queries; "
            f"got {k_length} keys and {q_length} queries."
        )


class LinearMechanism(Mechanism):
    """Linear attention with a feature map. Subclasses only build the map."""

    needs_training = True

    def __init__(self, config: MechanismConfig, feature_map: FeatureMap, **shape: Any):
        super().__init__(config, **shape)
        self.feature_map = feature_map

    def features(self, scale: float) -> tuple[FeatureFunction, FeatureFunction]:
        """φ of queries and of keys, for scores with this scale."""
        root = math.sqrt(scale)
        return self.feature_map("query", root), self.feature_map("key", root)

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        root = math.sqrt(scale)
        maps = self.feature_map("query", root), self.feature_map("key", root)
        if not causal:
            return linear_attention(q, k, v, *maps, key_mask)
        both = None if segments is None else (segments, segments)
        return causal_linear_attention(q, k, v, *maps, key_mask, both)[0]

    def attend_part(self, q, k, v, part, *, scale, causal):
        if causal:
            return part_of_causal_linear_attention(q, k, v, *self.features(scale), part)[0]
        return part_of_linear_attention(q, k, v, *self.features(scale), part)

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        out, _, state = causal_linear_attention(q, k, v, *self.features(scale), key_mask, sums=state)
        return out, state

    def new_state(self, batch, value_dim, dtype, device):
        return Sums.of_none(self.feature_map("key"), (batch, self.num_kv_heads, value_dim), dtype, device)

    def dense_weights(self, x, y, key_mask, causal, segments):
        phi_q, phi_k = self.features(1.0)
        q, k = phi_q.exactly(x), phi_k.exactly(y)
        scores = q.dense() @ repeat_heads(k.dense(), x.shape[1]).mT
        allowed = allowed_pairs(x.shape[2], y.shape[2], key_mask, causal, segments, device=x.device)
        floor = None
        if phi_q.floor is not None:  # in units of exp(q.log + k.log)
            floor = phi_q.floor.to(x).expand(self.num_kv_heads, 1, 1).repeat_interleave(x.shape[1] // y.shape[1], 0)
            floor = floor * torch.exp(q.log + repeat_heads(k.log, x.shape[1]).mT)
        return normalised_weights(scores, allowed, floor)

    def multiply_adds(self, length, causal):
        products = linear_multiply_adds(length, self.feature_map.num_features, self.head_dim, causal)
        return 2 * length * self.feature_map.multiply_adds() + products


def random_maps(module: nn.Module) -> list[RandomFeatures]:
    """All feature maps inside a module that are drawn at random."""
    return [m for m in module.modules() if isinstance(m, RandomFeatures)]
