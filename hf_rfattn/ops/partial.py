"""Unfinished attention: numerator and denominator with their common scale kept apart, in log space.

Near field, far field and running state each give one; `merge` adds them without overflow, `normalise` divides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .scratch import fresh, may_overwrite

LEAST = -80.0  # of exponents: exp of it is still a normal number in float32


class Partial(NamedTuple):
    """Stands for `exp(log_scale) * (numerator, denominator)`; `log_scale` is -inf where no key is visible."""

    numerator: Tensor  # [B, H, L, D]
    denominator: Tensor  # [B, H, L, 1]
    log_scale: Tensor  # [B, H, L, 1]


def finite(log: Tensor) -> Tensor:
    """The same offset with a number in place of -inf (nothing there), so that it can be subtracted from -inf."""
    return log.clamp(min=torch.finfo(log.dtype).min)


def exp_less(log: Tensor, offset: Tensor, *, reuse: bool = False) -> Tensor:
    """exp(log - offset), at least exp(LEAST); what must be exactly zero is multiplied by zero elsewhere.

    Beside the sums of at least one that it enters, exp(LEAST) is nothing; but libraries compute exponentials that
    underflow (or those of -inf) up to a hundred times more slowly, and real heads have many. `reuse` lets the result
    take the place of `log`, where autograd does not need it.
    """
    if reuse and may_overwrite():
        return log.sub_(finite(offset)).clamp_(min=LEAST).exp_()
    exponent = torch.sub(log, finite(offset), out=fresh(log.shape, log) if log.shape[-1] > 1 else None)
    exponent.detach().clamp_(min=LEAST)  # autograd need not know
    return exponent.exp_()


def merge(*partials: Partial) -> Partial:
    """The sum of several partials, on the scale of the largest."""
    if len(partials) == 1:
        return partials[0]
    scale = partials[0].log_scale
    for p in partials[1:]:
        scale = torch.maximum(scale, p.log_scale)
    weights = [exp_less(p.log_scale, scale) for p in partials]
    numerator, denominator = partials[0].numerator * weights[0], partials[0].denominator * weights[0]
    for p, w in zip(partials[1:], weights[1:], strict=True):
        numerator, denominator = torch.addcmul(numerator, p.numerator, w), torch.addcmul(denominator, p.denominator, w)
    return Partial(numerator, denominator, scale)


def normalise(partial: Partial, floor: Tensor | None = None) -> Tensor:
    """Numerator over denominator; zeros where no key is visible, which makes both zero.

    `floor` guards signed features, whose denominator can vanish: its magnitude is kept at or above the floor.
    """
    denominator = partial.denominator
    if floor is not None:
        sign = torch.where(denominator < 0, -1.0, 1.0).to(denominator.dtype)
        denominator = sign * torch.maximum(denominator.abs(), floor)
    inverse = denominator.masked_fill(denominator == 0, torch.inf).reciprocal()
    return torch.mul(partial.numerator, inverse, out=fresh(partial.numerator.shape, inverse))
