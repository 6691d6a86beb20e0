"""Memory that a loop over blocks uses again and again, on a CPU and without gradients.

Most of the time of attention in blocks is memory that the processor has not seen lately: pages fresh from the system,
or buffers that fell out of the cache. A block therefore takes its large intermediate results from one small piece of
memory that each thread keeps. With gradients, under torch.compile, on other devices or when it is full, `fresh` gives
None, which as `out=None` means new memory to every function of torch.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

SIZE = 2**23  # numbers: 32 MiB in float32
_ALIGNED = 16  # numbers


class _Memory(threading.local):
    def __init__(self) -> None:
        self.used: int | None = None  # None where no block is being computed
        self.numbers: dict[torch.dtype, Tensor] = {}


_memory = _Memory()


@contextmanager
def scratch(like: Tensor) -> Iterator[None]:
    """While open, `fresh` gives memory of this thread, which is free again afterwards. One may open inside another."""
    if torch.compiler.is_compiling() or like.device.type != "cpu":
        yield
        return
    before = _memory.used
    _memory.used = before or 0
    try:
        yield
    finally:
        _memory.used = before


def may_overwrite() -> bool:
    """Whether tensors may be written over once they are not needed: autograd and compilers keep account of them."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def fresh(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """An uninitialised tensor for `out=`, or None for new memory."""
    if not may_overwrite() or _memory.used is None:
        return None
    if like.dtype not in _memory.numbers:
        with torch.inference_mode(False):  # to be of use outside of it too
            _memory.numbers[like.dtype] = torch.empty(SIZE, dtype=like.dtype)
    count = prod(shape)
    start = _memory.used
    if start + count > SIZE:
        return None
    _memory.used = start + -(-count // _ALIGNED) * _ALIGNED
    return _memory.numbers[like.dtype][start : start + count].view(shape)


def kept(x: Tensor) -> Tensor:
    """The same numbers in memory of their own, if they lie in the thread's."""
    mine = _memory.numbers.get(x.dtype)
    if mine is None or x.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr():
        return x
    return x.clone()


def product(a: Tensor, b: Tensor, add_to: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`a @ b`, of the same leading dimensions; added to another tensor (and in its place) if there is one.

    `out`: where to write it, where autograd does not look.
    """
    shape = (*a.shape[:-1], b.shape[-1])
    if not may_overwrite():
        return a @ b if add_to is None else add_to + a @ b
    a, b = (x.flatten(0, -3) for x in (a, b))
    if add_to is not None:
        torch.baddbmm(add_to.view(-1, *shape[-2:]), a, b, out=add_to.view(-1, *shape[-2:]))
        return add_to
    if out is not None:
        torch.bmm(a, b, out=out.view(-1, *shape[-2:]))
        return out
    return torch.bmm(a, b, out=fresh((a.shape[0], *shape[-2:]), a)).view(shape)
