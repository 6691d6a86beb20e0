"""Recomputation in backward: only the inputs are saved, and intermediate results are computed again.

Functions differentiated here must be pure, that is, read nothing but their arguments. Gradients then flow to the
tensors that forward received, even if the module that owned them has changed since. Arguments may be nested tuples of
tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .tiles import traced


def differentiate(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function, which receives `(spec, *leaves)` for the arguments. Returns None if no gradient is
    needed, or if the computation is traced and autograd must see its operations.
    """
    if traced() or not torch.is_grad_enabled():
        return None
    leaves, spec = tree_flatten(arguments)
    needed = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    return function.apply(spec, *leaves) if needed else None


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute `function(*arguments)` and save only the arguments for backward.

    The function must be pure and return a tensor or a tuple of tensors.

    >>> weight, x = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    >>> y = recompute(lambda weight, x: weight * x.exp(), weight, x)
    >>> y.backward()
    >>> bool(x.grad == y), bool(weight.grad == x.exp())
    (True, True)
    """
    found = differentiate(_Recompute, function, *arguments)
    return function(*arguments) if found is None else found


class _Recompute(torch.autograd.Function):
    """Like torch.utils.checkpoint, without its hooks on every operation."""

    @staticmethod
    def forward(ctx: Any, spec: TreeSpec, *leaves: Any) -> Any:
        keep(ctx, spec, leaves)
        function, *arguments = tree_unflatten(leaves, spec)
        return function(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients_of(lambda function, *arguments: function(*arguments), kept(ctx)[0], gradients)


def keep(ctx: Any, spec: TreeSpec, leaves: Sequence[Any], *results: Tensor) -> None:
    """Save the arguments and some results of a function for backward."""
    ctx.spec, ctx.count = spec, len(leaves)
    ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves), *results)


def kept(ctx: Any) -> tuple[Any, list[Tensor]]:
    """Return the arguments and the results that `keep` saved."""
    saved = ctx.saved_tensors
    leaves = [b if a is None else a for a, b in zip(saved[: ctx.count], ctx.others, strict=True)]
    return tree_unflatten(leaves, ctx.spec), list(saved[ctx.count :])


def gradients_of(function: Callable[..., Any], arguments: Any, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Backpropagate gradients of a function's outputs to the leaves of its arguments; None where none is needed.

    If autograd builds a graph of the backward pass (`create_graph=True`), the results can be differentiated again.
    """
    graph = torch.is_grad_enabled()
    leaves, spec = tree_flatten(arguments)
    needed = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    if not graph:
        leaves = [x.detach().requires_grad_() if n else x for x, n in zip(leaves, needed, strict=True)]
    with torch.enable_grad(), torch.autocast(gradients[0].device.type, enabled=False):
        outputs = function(*tree_unflatten(leaves, spec))
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        inputs = [x for x, n in zip(leaves, needed, strict=True) if n]
        if not pairs:
            return [None] * len(leaves)
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], inputs, [g for _, g in pairs], create_graph=graph, allow_unused=True
            )
        )
    return [next(found) if n else None for n in needed]
