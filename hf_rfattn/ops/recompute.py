"""Trading time for memory: a function whose intermediate results are computed again in backward instead of being kept.

Attention works in blocks of positions, each of them one such function: training keeps the inputs and outputs of a
block, never its features or scores.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .scratch import kept


def recompute(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, held: Sequence[Tensor] = ()) -> Any:
    """`function(*inputs)`, a tuple of tensors, keeping only the inputs for backward.

    `held` are parameters and buffers that the function reads by itself: parameters get their gradients, and a change of
    any of them between forward and backward is an error, as always in autograd. The function is deterministic.

    >>> weight = torch.nn.Parameter(torch.tensor(3.0))
    >>> x = torch.tensor(2.0, requires_grad=True)
    >>> (y,) = recompute(lambda x: (weight * x.exp(),), x, held=[weight])
    >>> y.backward()
    >>> bool(x.grad == y), bool(weight.grad == x.exp())
    (True, True)
    """
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *held))):
        return function(*inputs)
    if torch.compiler.is_compiling():  # the compiler knows this one, and decides by itself what to keep
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    return _Recompute.apply(function, len(inputs), *inputs, *held)


class _Recompute(torch.autograd.Function):
    """Like torch.utils.checkpoint, without its hooks on every operation."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], count: int, *tensors: Tensor) -> Any:
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*tensors)
        return tuple(kept(t) for t in function(*tensors[:count]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)][: ctx.count]
        with torch.autocast(tensors[0].device.type, enabled=False):
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            leaves = [t for t, n in zip([*inputs, *tensors[ctx.count :]], needed, strict=True) if n]
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
            found = iter(
                torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
                if pairs
                else [None] * len(leaves)
            )
        return None, None, *(next(found) if n else None for n in needed)
