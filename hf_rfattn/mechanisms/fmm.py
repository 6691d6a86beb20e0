"""FMMformer: exact attention near the diagonal, feature maps for all that is far, as in the fast multipole method.

`normalizer="separate"` (the paper's): w₁ · softmax(band_W(xyᵀ)) V + Σ_l w₂ₗ · φ_l(x)(φ_l(y)ᵀV) / φ_l(x)φ_l(y)ᵀ1, every
far term over all keys. `normalizer="joint"`: one denominator, exact scores inside the band and φ(x)ᵀφ(y) outside it;
the same as softmax once the band covers the input. w₁, w₂ₗ > 0 are learned per head.

Nguyen et al., "FMMformer: Efficient and Flexible Transformer via Decomposed Near-field and Far-field Attention",
NeurIPS 2021.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..ops import (
    Inputs,
    Partial,
    State,
    allowed_pairs,
    attend_in_blocks,
    combine,
    merge,
    normalise,
    normalised_weights,
    summarise,
)
from ..ops.banded_attention import global_keys, with_global_rows
from ..ops.naive import masked_softmax, repeat_heads
from .base import LinearMechanism, Mechanism
from .config import MechanismConfig, check_at_least
from .near_field import Window, global_part, near_multiply_adds, near_pairs
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
        if config.normalizer == "joint":
            for m in self._far():
                if not m.feature_map.positive:
                    raise ValueError(
                        f"normalizer='joint' needs positive feature maps; {m.config.name!r} is signed here."
                    )
        self.log_weights = nn.Parameter(torch.empty(self.num_heads, 1 + len(far)))  # near and each far
        self.reset_parameters()

    def _far(self) -> list[LinearMechanism]:
        return [cast(LinearMechanism, m) for m in self.far]

    def _log_weight(self, term: int, dtype: torch.dtype) -> Tensor:
        return self.log_weights[:, term, None, None].to(dtype)  # [H, 1, 1]

    def attend(self, inputs):
        config = self.config
        joint = config.normalizer == "joint"
        out, _ = attend_in_blocks(
            inputs,
            self._joint if joint else self._near,
            bandwidth=config.bandwidth,
            far=[far.far_field(joint=True) for far in self._far()] if joint else (),
            apart=joint,
            far_mask=self._not_global(inputs) if joint else None,
            extra=global_part(inputs, config.global_tokens, config.bandwidth),
            held=self.held(),
        )
        if not joint:
            out = self._add_far(out, (far.attend(inputs) for far in self._far()))
        return with_global_rows(out, inputs, config.global_tokens)

    def _add_far(self, out: Tensor, terms: Iterable[Tensor]) -> Tensor:
        """Separate terms, each with a denominator of its own."""
        dtype = torch.promote_types(out.dtype, torch.float32)
        total = out.to(dtype)
        for number, term in enumerate(terms, start=1):
            total = torch.addcmul(total, self._log_weight(number, dtype).exp(), term.to(dtype))
        return total.to(out.dtype)

    def _joint(self, parts: list[Partial], rows: slice) -> Tensor:
        """One denominator for all."""
        weights = [self._log_weight(term, part.numerator.dtype).exp() for term, part in enumerate(parts)]
        weighted = zip(parts, weights, strict=True)
        return normalise(merge(*(Partial(p.numerator * w, p.denominator * w, p.log_scale) for p, w in weighted)))

    def _near(self, parts: list[Partial], rows: slice) -> Tensor:
        """The near field alone, as one term of separate ones."""
        return self._log_weight(0, parts[0].numerator.dtype).exp() * normalise(parts[0])

    def new_state(self, batch, value_dim, dtype, device):
        sizes = batch, value_dim, dtype, device
        state = Window.new(self, self.config.bandwidth, self.config.global_tokens, *sizes)
        for term, far in enumerate(self._far(), start=1):
            state |= {f"far{term}.{name}": value for name, value in far.new_state(*sizes).items()}
        return state

    def attend_after(self, inputs, state, fresh):
        window = Window(state, inputs, fresh, self.config.bandwidth, self.config.global_tokens)
        new = window.new_state()
        pasts = [
            {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            for prefix in (f"far{term}." for term in range(1, 1 + len(self.far)))
        ]
        if self.config.normalizer == "joint":
            states = [State(past["log_scale"], past["outer"], past["total"]) for past in pasts]
            fields = [far.far_field(joint=True) for far in self._far()]
            out = window.attend(self._joint, fields, states, self.held())
            leaving = window.leaving()
            afters = [combine(s, summarise(leaving, f))._asdict() for s, f in zip(states, fields, strict=True)]
        else:
            near = window.attend(self._near, held=self.held())
            found = [far.attend_after(inputs, past, fresh) for far, past in zip(self._far(), pasts, strict=True)]
            out = self._add_far(near, (term for term, _ in found))
            afters = [after for _, after in found]
        for term, after in enumerate(afters, start=1):
            new |= {f"far{term}.{name}": value for name, value in after.items()}
        return out, new

    def _not_global(self, inputs: Inputs) -> Tensor | None:
        """The keys that a joint far field sees: all but the global ones, which are exact."""
        if not self.config.global_tokens:
            return None
        length, mask = inputs.k.shape[2], inputs.key_mask
        chosen = global_keys(length, self.config.global_tokens, mask, inputs.causal, inputs.segments, inputs.k.device)
        return (~chosen if mask is None else mask & ~chosen).expand(inputs.k.shape[0], -1)

    def dense_weights(self, x, y, key_mask, causal, segments):
        config = self.config
        lengths = x.shape[2], y.shape[2]
        near = near_pairs(*lengths, config.bandwidth, config.global_tokens, key_mask, causal, segments, x.device)
        scores = x @ repeat_heads(y, x.shape[1]).transpose(-1, -2)
        weight = self.log_weights.to(x.dtype).exp()[:, :, None, None]  # [H, terms, 1, 1]
        allowed = allowed_pairs(*lengths, key_mask, causal, segments, device=x.device)
        if config.normalizer == "separate":
            out = weight[:, 0] * masked_softmax(scores, near)
            for term, far in enumerate(self._far(), start=1):
                out = out + weight[:, term] * far.dense_weights(x, y, key_mask, causal, segments)
            if not config.global_tokens or causal:
                return out
            chosen = global_keys(lengths[1], config.global_tokens, key_mask, causal, segments, x.device)
            return torch.where(chosen[:, None, :, None], masked_softmax(scores, allowed), out)
        joint = weight[:, 0] * scores.exp().masked_fill(~near, 0)
        for term, far in enumerate(self._far(), start=1):
            q, k = far.feature_map(x, "query"), far.feature_map(y, "key")
            products = q.dense() @ repeat_heads(k.dense(), x.shape[1]).transpose(-1, -2)
            joint = joint + weight[:, term] * products.masked_fill(near, 0)
        return normalised_weights(joint, allowed)

    def multiply_adds(self, length, causal):
        near = near_multiply_adds(length, self.head_dim, self.config.bandwidth, self.config.global_tokens, causal)
        outside = self.config.bandwidth if self.config.normalizer == "joint" else None
        return near + sum(far.far_multiply_adds(length, causal, outside) for far in self._far())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Separate terms start as an equal blend; a joint denominator starts as softmax has it."""
        share = 1.0 if self.config.normalizer == "joint" else 1 / self.log_weights.shape[1]
        self.log_weights.fill_(math.log(share))


register_mechanism("fmm", FmmConfig, FmmAttention, aliases={"fmmformer": {}})
