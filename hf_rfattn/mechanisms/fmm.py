"""FMMformer: exact attention near the diagonal, feature maps for all that is far, as in the fast multipole method.

`normalizer="separate"` (the paper's): w₁ · softmax(band_W(xyᵀ)) V + Σ_l w₂ₗ · φ_l(x)(φ_l(y)ᵀV) / φ_l(x)φ_l(y)ᵀ1, every
far term over all keys. `normalizer="joint"`: one denominator, exact scores inside the band and φ(x)ᵀφ(y) outside it;
the same as softmax once the band covers the input. w₁, w₂ₗ > 0 are learned per head.

Nguyen et al., "FMMformer: Efficient and Flexible Transformer via Decomposed Near-field and Far-field Attention",
NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..ops import (
    Partial,
    State,
    allowed_pairs,
    combine,
    linear_attention,
    merge,
    normalise,
    normalised_weights,
    read_state,
    summarise,
)
from ..ops.banded_attention import global_keys
from ..ops.naive import masked_softmax, repeat_heads
from .base import LinearMechanism, Mechanism
from .config import MechanismConfig, check_at_least
from .near_field import Window, near_field, near_multiply_adds, near_pairs
from .registry import mechanism_class, register_mechanism, resolve_config


@dataclass(frozen=True)
class FmmConfig(MechanismConfig):
    """Options of "fmm".

    `bandwidth` and `global_tokens`: the near field, as in "band". `far`: one or more linear mechanisms by name or
    config, for example ("elu", "elu-", "tanh") as in the paper. `normalizer`: "separate" or "joint".
    """

    bandwidth: int = 32
    far: tuple[str | MechanismConfig, ...] = ("favor+",)
    normalizer: Literal["separate", "joint"] = "separate"
    global_tokens: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.far, (str, MechanismConfig)):
            object.__setattr__(self, "far", (self.far,))
        elif isinstance(self.far, list):
            object.__setattr__(self, "far", tuple(self.far))
        super().__post_init__()
        check_at_least(self, 0, "bandwidth", "global_tokens")
        if not self.far:
            raise ValueError("far must name at least one feature map; for the near field alone use 'band'.")
        for far in self.far:
            if not issubclass(mechanism_class(resolve_config(far)), LinearMechanism):
                raise ValueError(f"far takes linear mechanisms such as 'favor+', 'elu', 'hedgehog', not {far!r}.")


class FmmAttention(Mechanism):
    handles_cross_attention = False
    config: FmmConfig

    def __init__(self, config: FmmConfig, *, seed: tuple[int, ...], **shape: Any):
        super().__init__(config, seed=seed, **shape)
        far = [resolve_config(f) for f in config.far]
        self.far = nn.ModuleList(mechanism_class(f)(f, seed=(*seed, number), **shape) for number, f in enumerate(far))
        joint = config.normalizer == "joint"
        if joint:
            for m in self._far():
                if not m.feature_map.positive:
                    raise ValueError(
                        f"normalizer='joint' needs positive feature maps; {m.config.name!r} is signed here."
                    )
        # Separate terms start as an equal blend; a joint denominator starts as softmax has it.
        start = torch.zeros(1 + len(far)) if joint else torch.full((1 + len(far),), 1 / (1 + len(far))).log()
        self.log_weights = nn.Parameter(start.repeat(self.num_heads, 1))  # [H, near and each far]

    def _far(self) -> list[LinearMechanism]:
        return [cast(LinearMechanism, m) for m in self.far]

    def _log_weight(self, term: int, dtype: torch.dtype) -> Tensor:
        return self.log_weights[:, term, None, None].to(dtype)  # [H, 1, 1]

    def attend(self, x, y, v, key_mask, causal, segments):
        config = self.config
        near = near_field(x, y, v, config.bandwidth, config.global_tokens, key_mask, causal, segments)
        if config.normalizer == "separate":
            out = self._log_weight(0, x.dtype).exp() * normalise(near)
            for term, far in enumerate(self._far(), start=1):
                out = out + self._log_weight(term, x.dtype).exp() * far.attend(x, y, v, key_mask, causal, segments)
            return out
        parts = [self._weighted(near, 0)]
        far_mask = self._not_global(y, key_mask, causal, segments)
        for term, far in enumerate(self._far(), start=1):
            q, k = far.features(x, y)
            part = linear_attention(
                q, k, v, key_mask=far_mask, causal=causal, segments=segments, outside=config.bandwidth
            )
            parts.append(self._weighted(part, term))
        return normalise(merge(*parts))

    def new_state(self, batch, value_dim, dtype, device):
        sizes = batch, value_dim, dtype, device
        state = Window.new(self, self.config.bandwidth, self.config.global_tokens, *sizes)
        for term, far in enumerate(self._far(), start=1):
            state |= {f"far{term}.{name}": value for name, value in far.new_state(*sizes).items()}
        return state

    def attend_after(self, x, y, v, key_mask, state, fresh):
        window = Window(state, y, v, key_mask, fresh, self.config.bandwidth, self.config.global_tokens)
        near = window.attend(x)
        new = window.new_state()
        joint = self.config.normalizer == "joint"
        parts = [self._weighted(near, 0)]
        out = self._log_weight(0, x.dtype).exp() * normalise(near)
        for term, far in enumerate(self._far(), start=1):
            prefix = f"far{term}."
            past = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if joint:
                part, after = self._far_after(far, x, window, past)
                parts.append(self._weighted(part, term))
            else:
                term_out, after = far.attend_after(x, y, v, key_mask, past, fresh)
                out = out + self._log_weight(term, x.dtype).exp() * term_out
            new |= {prefix + name: value for name, value in after.items()}
        return normalise(merge(*parts)) if joint else out, new

    def _far_after(self, far: LinearMechanism, x: Tensor, window: Window, state: dict[str, Tensor]):
        """The far field of a joint normaliser: the past beyond the window, and what new queries leave behind them."""
        past = State(state["log_scale"], state["outer"], state["total"])
        q, k = far.features(window.aligned(x), window.keys)
        W, L = self.config.bandwidth, window.length
        part = read_state(q.map(lambda z: z[:, :, W:]), past)
        if L > 1:  # one new token alone has nothing behind it that is not in the state
            beyond = linear_attention(q, k, window.values, key_mask=window.far, causal=True, outside=W)
            part = merge(part, Partial(*(z[:, :, W:] for z in beyond)))
        leaving = summarise(k.map(lambda z: z[:, :, :L]), window.values[:, :, :L], window.far[:, :L])
        return part, combine(past, leaving)._asdict()

    def _weighted(self, part: Partial, term: int) -> Partial:
        weight = self._log_weight(term, part.numerator.dtype).exp()
        return Partial(part.numerator * weight, part.denominator * weight, part.log_scale)

    def _not_global(self, y: Tensor, key_mask: Tensor | None, causal: bool, segments: Tensor | None) -> Tensor | None:
        if not self.config.global_tokens:
            return key_mask
        chosen = global_keys(y.shape[2], self.config.global_tokens, key_mask, causal, segments, y.device)
        return (~chosen if key_mask is None else key_mask & ~chosen).expand(y.shape[0], -1)

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        lengths = x.shape[2], y.shape[2]
        near = near_pairs(*lengths, config.bandwidth, config.global_tokens, key_mask, causal, segments, x.device)
        scores = x @ repeat_heads(y, x.shape[1]).transpose(-1, -2)
        weight = self.log_weights.to(x.dtype).exp()[:, :, None, None]  # [H, terms, 1, 1]
        if config.normalizer == "separate":
            out = weight[:, 0] * masked_softmax(scores, near)
            for term, far in enumerate(self._far(), start=1):
                out = out + weight[:, term] * far.dense_weights(x, y, key_mask, causal, segments)
            return out
        allowed = allowed_pairs(*lengths, key_mask, causal, segments, device=x.device)
        joint = weight[:, 0] * scores.exp().masked_fill(~near, 0)
        for term, far in enumerate(self._far(), start=1):
            q, k = far.features(x, y)
            products = q.dense() @ repeat_heads(k.dense(), x.shape[1]).transpose(-1, -2)
            joint = joint + weight[:, term] * products.masked_fill(near, 0)
        return normalised_weights(joint, allowed)

    def multiply_adds(self, length, causal):
        near = near_multiply_adds(length, self.head_dim, self.config.bandwidth, self.config.global_tokens, causal)
        outside = self.config.bandwidth if self.config.normalizer == "joint" else None
        return near + sum(far.far_multiply_adds(length, causal, outside) for far in self._far())


register_mechanism("fmm", FmmConfig, FmmAttention, aliases={"fmmformer": {}})
