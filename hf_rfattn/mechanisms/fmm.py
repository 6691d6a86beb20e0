"""FMMformer: exact attention near the diagonal and linear attention for the rest, as in the fast multipole method.

`normalizer="separate"`, as in the paper: w₁ · softmax(band_W(xyᵀ)) V + Σ_l w₂ₗ · φ_l(x)(φ_l(y)ᵀV) / φ_l(x)φ_l(y)ᵀ1,
where the far terms cover all keys. `normalizer="joint"`: exact scores inside the band and φ(x)ᵀφ(y) outside it share
one denominator, which equals softmax if the band covers the input. w₁, w₂ₗ > 0 are learned per head.

Nguyen et al., "FMMformer: Efficient and Flexible Transformer via Decomposed Near-field and Far-field Attention",
NeurIPS 2021.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import State, Sums, causal_linear_attention, global_keys, merge
from ..ops.banded import Window
from ..ops.naive import allowed_pairs, masked_softmax, normalised_weights, repeat_heads
from ..ops.sharded import part_of_causal_linear_attention
from ..ops.tiles import traced
from .band import NearField
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, option
from .registry import mechanism_class, register_mechanism, resolve_config


@dataclass(frozen=True)
class FmmConfig(MechanismConfig):
    """Options of "fmm"."""

    bandwidth: int = option(64, "Window size of the exact near field: keys at most this many positions away.")
    far: tuple[str | MechanismConfig, ...] = option(
        ("favor+",),
        "Linear mechanisms of the far field, one or more names or configs; the paper uses elu, elu- and tanh.",
    )
    normalizer: Literal["separate", "joint"] = option(
        "joint", "joint: near and far field share one denominator; separate: each has its own, as in the paper."
    )
    global_tokens: int = option(
        1, "Number of global tokens at the start of a sequence (and at its end, unless causal), as in Longformer."
    )

    def __post_init__(self) -> None:
        if isinstance(self.far, (str, MechanismConfig, list)):
            object.__setattr__(self, "far", tuple(self.far) if isinstance(self.far, list) else (self.far,))
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")
        if not self.far:
            raise ValueError("far is empty; give a linear mechanism, or use 'band' for the near field alone.")
        for far in self.far:
            if not issubclass(mechanism_class(resolve_config(far)), LinearMechanism):
                raise ValueError(f"far must be linear mechanisms such as 'favor+', 'elu' or 'hedgehog', not {far!r}.")


@dataclass
class FmmState(State):
    """The window of the near field, and the sums of each far field: over all keys, or over those that have left the
    window if the normalizer is joint.
    """

    window: Window
    far: list[Sums]


class FmmAttention(NearField):
    config: FmmConfig
    far: Sequence[LinearMechanism]  # an nn.ModuleList

    def __init__(self, config: FmmConfig, *, seed: tuple[int, ...], **shape: Any):
        super().__init__(config, seed=seed, **shape)
        far = [resolve_config(f) for f in config.far]
        terms = (mechanism_class(f)(f, seed=(*seed, number), **shape) for number, f in enumerate(far))
        self.far = nn.ModuleList(terms)  # type: ignore[assignment]
        signed = [m.config.name for m in self.far if not m.feature_map.positive]
        if config.normalizer == "joint" and signed:
            raise ValueError(
                f"normalizer='joint' needs positive feature maps, but the features of {signed[0]!r} are signed. Choose "
                "normalizer='separate' or another far field."
            )
        self.log_weights = nn.Parameter(torch.empty(self.num_heads, 1 + len(far)))  # near field, then far fields
        self.reset_parameters()

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        masks = {"scale": scale, "key_mask": key_mask, "causal": causal, "segments": segments}
        near = self.near_field(q, k, v, **masks)
        if self.config.normalizer == "separate":
            out = self._sum(near[0], [far.attend(q, k, v, **masks) for far in self.far], q.dtype)
        else:
            out = self._merge(near, [self._far_field(far, q, k, v, **masks) for far in self.far], q.dtype)
        return self.with_global_rows(out, q, k, v, scale, key_mask, causal)

    def attend_part(self, q, k, v, part, *, scale, causal):
        width, count, options = self.config.bandwidth, self.config.global_tokens, {"scale": scale, "causal": causal}
        near = self.near_field_of_part(q, k, v, part, **options)
        if self.config.normalizer == "separate":
            out = self._sum(near[0], [far.attend_part(q, k, v, part, **options) for far in self.far], q.dtype)
        else:
            others, fars = part.without_global(count, causal, q) if count else part, []
            for far in self.far:
                maps, ways = far.features(scale), (False,) if causal else (False, True)
                fars.append([part_of_causal_linear_attention(q, k, v, *maps, others, width + 1, way) for way in ways])
            out = self._merge(near, fars, q.dtype)
        return self.with_global_rows(out, q, k, v, scale, None, causal, part)

    def _sum(self, near: Tensor, fars: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Weighted sum of terms that each have their own denominator."""
        exact = torch.promote_types(dtype, torch.float32)
        weights = self.log_weights.to(exact).exp()[:, :, None, None]  # [H, terms, 1, 1]
        total = near.to(exact) * weights[:, 0]
        for number, term in enumerate(fars, start=1):
            total = torch.addcmul(total, weights[:, number], term.to(exact))
        return total.to(dtype)

    def _merge(self, near: tuple[Tensor, Tensor], fars: list[list[tuple[Tensor, Tensor]]], dtype) -> Tensor:
        """Merge all terms under one denominator."""
        weighted = []
        for number, parts in enumerate([[near], *fars]):
            for out, lse in parts:
                weighted.append((out.to(lse.dtype), lse + self.log_weights[:, number, None, None].to(lse)))
        return merge(*weighted)[0].to(dtype)

    def _far_field(self, far, q, k, v, *, scale, key_mask, causal, segments) -> list[tuple[Tensor, Tensor]]:
        """Far field over the keys outside the band that are not global: those before it and, unless causal, after."""
        count, length = self.config.global_tokens, k.shape[2]
        key_mask = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        if count:
            key_mask = key_mask & ~global_keys(length, count, key_mask, causal, segments, k.device)
        parts = [self._keys_before(far, q, k, v, scale, key_mask, segments)]
        if not causal:
            q, k, v = (x.flip(2) for x in (q, k, v))
            out, lse = self._keys_before(far, q, k, v, scale, key_mask.flip(1), None)
            parts.append((out.flip(2), lse.flip(2)))
        return parts

    def _keys_before(self, far: LinearMechanism, q, k, v, scale, key_mask, segments) -> tuple[Tensor, Tensor]:
        """Attention to the keys more than a bandwidth before each query: causal attention to keys shifted by that."""
        length, lag = k.shape[2], self.config.bandwidth + 1
        if not traced():  # a compiler would need two graphs, one for sequences shorter than the band
            lag = min(lag, length)
        k, v = (F.pad(x, (0, 0, lag, 0))[:, :, :length] for x in (k, v))
        key_mask = F.pad(key_mask, (lag, 0))[:, :length]
        if segments is not None:
            segments = segments, torch.cat([segments[:, :1].expand(-1, lag), segments], dim=1)[:, :length]
        return causal_linear_attention(q, k, v, *far.features(scale), key_mask, segments)[:2]

    def new_state(self, batch, value_dim, dtype, device):
        config, sizes = self.config, (batch, self.num_kv_heads, value_dim)
        window = Window.new(*sizes, self.head_dim, config.bandwidth, config.global_tokens, dtype, device)
        state = FmmState(window, [])
        for far in self.far:
            state.far.append(Sums.of_none(far.feature_map("key"), sizes, dtype, device))
        return state

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        near, (keys, values, taken), window = state.window.attend(q, k, v, scale, key_mask)
        joint, after = self.config.normalizer == "joint", []
        terms: list[Any] = []
        for far, past in zip(self.far, state.far, strict=True):
            if joint:
                x, maps = q.to(keys.dtype), far.features(scale)
                *term, sums = causal_linear_attention(x, keys, values, *maps, taken, sums=past)
            else:
                term, sums = far.attend_after(q, k, v, past, scale=scale, key_mask=key_mask)
            terms.append([term] if joint else term)
            after.append(sums)
        out = self._merge(near, terms, q.dtype) if joint else self._sum(near[0], terms, q.dtype)
        return out, FmmState(window, after)

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        near = self.near_pairs(x, y, key_mask, causal, segments)
        scores = x @ repeat_heads(y, x.shape[1]).mT
        weight = self.log_weights.to(x.dtype).exp()[:, :, None, None]  # [H, terms, 1, 1]
        allowed = allowed_pairs(x.shape[2], y.shape[2], key_mask, causal, segments, device=x.device)
        if config.normalizer == "separate":
            out = weight[:, 0] * masked_softmax(scores, near)
            for term, far in enumerate(self.far, start=1):
                out = out + weight[:, term] * far.dense_weights(x, y, key_mask, causal, segments)
            if not config.global_tokens or causal:
                return out
            chosen = global_keys(y.shape[2], config.global_tokens, key_mask, causal, segments, x.device)
            return torch.where(chosen[:, None, :, None], masked_softmax(scores, allowed), out)
        joint = weight[:, 0] * scores.exp().masked_fill(~near, 0)
        for term, far in enumerate(self.far, start=1):
            q, k = far.feature_map("query").exactly(x).dense(), far.feature_map("key").exactly(y).dense()
            joint = joint + weight[:, term] * (q @ repeat_heads(k, x.shape[1]).mT).masked_fill(near, 0)
        return normalised_weights(joint, allowed)

    def multiply_adds(self, length, causal):
        near = super().multiply_adds(length, causal)
        if self.config.normalizer == "separate":
            return near + sum(far.multiply_adds(length, causal) for far in self.far)
        return near + sum((1 if causal else 2) * far.multiply_adds(length, True) for far in self.far)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights start equal: with sum 1 if the terms are separate, at 1 if they share a denominator."""
        share = 1.0 if self.config.normalizer == "joint" else 1 / self.log_weights.shape[1]
        self.log_weights.fill_(math.log(share))


register_mechanism("fmm", FmmConfig, FmmAttention, aliases={"fmmformer": {}})
