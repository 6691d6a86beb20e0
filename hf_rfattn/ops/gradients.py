"""Gradients of log-features, block by block, where those of attention itself are written out by hand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .linear_attention import Features


class FeatureGradients:
    """Takes gradients of log-features on to tokens, by autograd, and sums those of what the features read.

    `held` are the parameters and buffers they read; those `needed` get gradients.
    """

    def __init__(self, held: Sequence[Tensor], needed: Sequence[bool]):
        self.needed = needed
        self.learned = [t for t, n in zip(held, needed, strict=True) if n]
        self.sums: list[Tensor | None] = [None] * len(self.learned)

    def features(
        self, x: Tensor, features_of: Callable[[Tensor], Features]
    ) -> tuple[Tensor, Callable[[Tensor], Tensor | None]]:
        """Log-features of x, which may be written over, and what makes the gradient of x of theirs."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logs = features_of(x).log

        def back(gradient: Tensor) -> Tensor | None:
            if not logs.requires_grad:
                return None
            dx, *others = torch.autograd.grad(logs, [x, *self.learned], gradient.view_as(logs), allow_unused=True)
            for i, new in enumerate(others):
                if new is not None:
                    total = self.sums[i]
                    self.sums[i] = new if total is None else total + new
            return dx

        return logs.detach(), back

    def of_held(self) -> list[Tensor | None]:
        """The sums, None where no gradient is needed."""
        sums = iter(self.sums)
        return [next(sums) if n else None for n in self.needed]
