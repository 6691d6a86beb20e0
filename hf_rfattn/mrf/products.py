"""Long products of matrices and vectors with logarithms and signs, so that nothing overflows: what chains are made of.

Offsets are constants to autograd: they cancel wherever they are used.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import Features


class SignedLog(NamedTuple):
    """sign · exp(log)."""

    log: Tensor
    sign: Tensor

    @classmethod
    def of(cls, values: Tensor, offset: Tensor) -> "SignedLog":
        """values · exp(offset); what underflowed to zero stays finite and passes no gradient."""
        log = values.abs().clamp(min=torch.finfo(values.dtype).tiny).log()
        return cls(log + offset, values.detach().sign())

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Values whose largest magnitude is one, and the log of what they were divided by."""
        offset = largest(self.log, -1)
        return self.sign * torch.exp(self.log - offset), offset

    def normalised(self) -> tuple["SignedLog", Tensor]:
        """The same with a largest logarithm of zero, and what was subtracted, in float64: thousands of them add up."""
        offset = largest(self.log, -1)
        return SignedLog(self.log - offset, self.sign), offset.squeeze(-1).double()

    def sum(self) -> "SignedLog":
        """Over the last dimension."""
        values, offset = self.scaled()
        return SignedLog.of(values.sum(-1), offset.squeeze(-1))


class ScaledMatrix(NamedTuple):
    """diag(exp(row)) · core · diag(exp(column)): offsets to rows and columns keep the core near one."""

    row: Tensor  # [..., M]
    core: Tensor  # [..., M, M]
    column: Tensor  # [..., M]

    def times(self, other: "ScaledMatrix") -> "ScaledMatrix":
        between = self.column + other.row
        offset = largest(between, -1)
        core = (self.core * torch.exp(between - offset).unsqueeze(-2)) @ other.core
        size = core.detach().abs().amax(-1).clamp(min=torch.finfo(core.dtype).tiny)
        return ScaledMatrix(self.row + offset + size.log(), core / size.unsqueeze(-1), other.column)

    def after(self, message: SignedLog) -> SignedLog:
        """The row vector `message` times this matrix."""
        values, offset = SignedLog(message.log + self.row, message.sign).scaled()
        product = SignedLog.of((values.unsqueeze(-2) @ self.core).squeeze(-2), offset)
        return SignedLog(product.log + self.column, product.sign)


class Factors(NamedTuple):
    """Transitions that come apart: exp(xᵀy) ≈ Σ_r source_r(x) exp(source_log_r + target_log_r) target_r(y).

    Each feature has its own scale, in which its largest state weighs one.
    """

    source: Tensor  # [..., X, M]
    source_log: Tensor  # [..., M], or [..., 1] if all features share one
    target: Tensor
    target_log: Tensor

    @classmethod
    def of(cls, source: Features, target: Features) -> "Factors":
        """From features `[..., X, M]`."""
        parts = []
        for features in (source, target):
            offset = largest(features.log, -2)
            values = torch.exp(features.log - offset)
            parts += [values if features.factor is None else features.factor * values, offset.squeeze(-2)]
        return cls(*parts)

    def step(self, message: SignedLog) -> SignedLog:
        """The message about a node from that about the node before it, `[B, X]`, which must be normalised."""
        sums = SignedLog.of((message.sign * message.log.exp()) @ self.source, self.source_log + self.target_log)
        values, offset = sums.scaled()
        return SignedLog.of(values @ self.target.mT, offset)

    def log_kernel(self) -> Tensor:
        """log φ(x)ᵀφ(y), `[..., X, X]`, of positive features."""
        scale = self.source_log + self.target_log
        offset = largest(scale, -1)
        values = (self.source * torch.exp(scale - offset).unsqueeze(-2)) @ self.target.mT
        return SignedLog.of(values, offset.unsqueeze(-1)).log


def exact_step(scores: Tensor, message: SignedLog) -> SignedLog:
    """The same with transitions exp(scores), `[X, X]` or `[B, X, X]`, and positive messages."""
    log = torch.logsumexp(message.log.unsqueeze(-1) + scores, dim=-2)
    return SignedLog(log, torch.ones_like(log))


def tree_product(matrices: ScaledMatrix) -> ScaledMatrix:
    """The product over dimension 1, neighbours first: log₂ rounds."""
    while (count := matrices.core.shape[1]) > 1:
        even = count // 2 * 2
        left, right = (ScaledMatrix(*(x[:, start:even:2] for x in matrices)) for start in (0, 1))
        product = left.times(right)
        if even < count:
            product = ScaledMatrix(*(torch.cat([x, y[:, -1:]], 1) for x, y in zip(product, matrices, strict=True)))
        matrices = product
    return ScaledMatrix(*(x[:, 0] for x in matrices))


def largest(log: Tensor, dim: int) -> Tensor:
    """The maximum, detached; finite even where all is -inf."""
    return log.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(log.dtype).min)
