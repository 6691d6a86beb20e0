"""Unfinished attention: numerator and denominator with their common scale kept apart, in log space.

Near field, far field and running state each give one; `merge` adds them without overflow, `normalise` divides.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scratch import fresh

_LOG2_E = math.log2(math.e)


class Partial(NamedTuple):
    """Stands for `exp(log_scale) * (numerator, denominator)`; `log_scale` is -inf where no key is visible."""

    numerator: Tensor  # [B, H, L, D]
    denominator: Tensor  # [B, H, L, 1]
    log_scale: Tensor  # [B, H, L, 1]


def finite(log: Tensor) -> Tensor:
    """The same offset with a number in place of -inf (nothing there) that can be scaled, and subtracted from -inf."""
    return log.clamp(min=torch.finfo(log.dtype).min / 4)


def exp_less(log: Tensor, offset: Tensor, *, reuse: bool = False) -> Tensor:
    """exp(log - offset), zero where log is -inf; offsets are constants to autograd.

    `reuse` lets the result take the place of `log`, where autograd does not need it.
    """
    if torch.compiler.is_compiling():
        return torch.exp(log - finite(offset))
    if torch.is_grad_enabled() and log.requires_grad:
        return _ExpLess.apply(log, offset)
    return _exp2_less(log, offset, log if reuse else fresh(log.shape, log) if log.shape[-1] > 1 else None)


def _exp2_less(log: Tensor, offset: Tensor, out: Tensor | None = None) -> Tensor:
    """By powers of two: torch computes exponentials of e more slowly on a CPU, and far more slowly where they
    underflow, as those of real heads do.
    """
    return torch.add(finite(offset) * -_LOG2_E, log, alpha=_LOG2_E, out=out).exp2_()


class _ExpLess(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: Tensor, offset: Tensor) -> Tensor:
        found = _exp2_less(log, offset)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


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


def normalise(partial: Partial, floor: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Numerator over denominator; zeros where no key is visible, which makes both zero, or where it underflowed.

    `floor` guards signed features, whose denominator can vanish: its magnitude is kept at or above the floor. `out`:
    where to write it, where autograd does not look.
    """
    denominator = partial.denominator
    if floor is not None:
        sign = torch.where(denominator < 0, -1.0, 1.0).to(denominator.dtype)
        denominator = sign * torch.maximum(denominator.abs(), floor)
    # not by the reciprocal: its gradient, a square, overflows long before the quotient does
    denominator = denominator.masked_fill(underflowed(denominator), torch.inf)
    out = fresh(partial.numerator.shape, denominator) if out is None else out
    return torch.div(partial.numerator, denominator, out=out)


def underflowed(denominator: Tensor) -> Tensor:
    """Where it is zero, or has lost its digits and cannot be divided by."""
    return denominator.abs() < torch.finfo(denominator.dtype).tiny
