"""Unfinished attention: numerator and denominator with their common scale kept apart, in log space.

Near field, far field and running state each give one; `merge` adds them without overflow, `normalise` divides.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Stands for `exp(log_scale) * (numerator, denominator)`; `log_scale` is -inf where no key is visible."""

    numerator: Tensor  # [B, H, L, D]
    denominator: Tensor  # [B, H, L, 1]
    log_scale: Tensor  # [B, H, L, 1]


def finite(log: Tensor) -> Tensor:
    """The same offset with -inf (nothing there) replaced by 0, so that it can be subtracted."""
    return torch.where(log == -torch.inf, torch.zeros_like(log), log)


def merge(*partials: Partial) -> Partial:
    """The sum of several partials, on the scale of the largest."""
    scale = torch.stack([p.log_scale for p in partials]).amax(dim=0)
    weights = [torch.exp(p.log_scale - finite(scale)) for p in partials]
    numerator = sum(p.numerator * w for p, w in zip(partials, weights, strict=True))
    denominator = sum(p.denominator * w for p, w in zip(partials, weights, strict=True))
    return Partial(numerator, denominator, scale)  # type: ignore[arg-type]


def normalise(partial: Partial, floor: Tensor | None = None) -> Tensor:
    """Numerator over denominator; zeros where no key is visible.

    `floor` guards signed features, whose denominator can vanish: its magnitude is kept at or above the floor.
    """
    denominator = partial.denominator
    if floor is not None:
        sign = torch.where(denominator < 0, -1.0, 1.0).to(denominator.dtype)
        denominator = sign * torch.maximum(denominator.abs(), floor)
    nothing = (denominator == 0) | (partial.log_scale == -torch.inf)
    return partial.numerator.masked_fill(nothing, 0) / denominator.masked_fill(nothing, 1)
