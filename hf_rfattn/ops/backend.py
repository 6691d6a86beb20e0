"""Choice of kernels: plain torch operations, or fused kernels on a GPU (`ops.fused`).

`auto`, the default, uses the fused kernel of an operator if the device is a GPU, the kernel is installed and supports
the call, and it agrees with the torch path on that device. This check compares outputs and gradients on small random
inputs, at the first use of an operator with a given dtype and head size. `torch` never uses fused kernels; `fused` uses
them without the check.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..install import install_command
from .tiles import traced

BACKENDS = ("auto", "torch", "fused")
OPERATORS = ("linear", "causal", "band", "multipole", "causal multipole")
DEVICES = ("cuda",)  # torch's name for GPUs of both NVIDIA and AMD
SMALLEST_HEAD = 16  # smallest matrix size of tensor cores
CHECK_LENGTH = 160  # sequence length in checks, more than one block of FlexAttention
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.05, torch.float16: 0.05}  # relative; half precision rounds features

checks: dict[tuple[Any, ...], str | None] = {}  # (operator, device, dtype, head sizes): None if passed, or the failure
decisions: dict[str, str | None] = {}  # last call of each operator on a GPU: None for fused, or the reason why not


def set_backend(name: str) -> None:
    """Choose the kernels of all operators: "auto", "torch" or "fused".

    "auto" uses fused GPU kernels where they are available and pass a check; "torch" uses plain torch operations;
    "fused" skips the check. The environment variable HF_RFATTN_BACKEND sets the initial value.

    >>> set_backend("torch")
    >>> set_backend("auto")
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"Unknown backend {name!r}; choose one of {', '.join(BACKENDS)}.")
    _backend = name


def get_backend() -> str:
    """Return the backend in use: "auto", "torch" or "fused"."""
    return _backend


_backend = "auto"
set_backend(os.environ.get("HF_RFATTN_BACKEND", "auto"))


@contextmanager
def using(name: str) -> Iterator[None]:
    """Context manager that uses a backend."""
    before = get_backend()
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def missing(operator: str) -> str | None:
    """Return why the fused kernel of an operator cannot run in this installation, or None if it can."""
    if torch.__version__ < "2.13":
        return f"torch {torch.__version__} is older than 2.13"
    if find_spec("triton") is None:
        return "triton is not installed; it comes with GPU builds of torch"
    if operator == "causal" and find_spec("fla") is None:
        return f"flash-linear-attention is not installed; run {install_command('gpu')}"
    return None


def fused(operator: str, function: Callable[..., Any], arguments: tuple[Any, ...], problem: str | None = None) -> bool:
    """Whether to run the operator `function(*arguments)`, whose first arguments are q, k and v on a GPU, fused.

    `problem`: a reason why not that the caller already knows.
    """
    q, _, v = arguments[:3]
    if _backend == "torch":
        return False
    if problem is None and q.dtype not in TOLERANCE:
        problem = f"{q.dtype} is not supported"
    if problem is None and min(q.shape[3], v.shape[3]) < SMALLEST_HEAD:
        problem = f"the head size is below {SMALLEST_HEAD}"
    if problem is None and not torch.compiler.is_compiling() and traced():
        problem = "transforms of torch.func need plain operations"
    problem = problem or missing(operator)
    if problem is None and _backend == "auto":
        key = operator, str(q.device), q.dtype, q.shape[3], v.shape[3]
        if key not in checks:
            if traced():
                return False  # the check cannot run inside compiled code
            checks[key] = _compare(operator, function, arguments)
        problem = checks[key]
    if not traced():
        decisions[operator] = problem
    return problem is None


def _compare(operator: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str | None:
    """Compare both implementations on small random inputs. Returns None if they agree; else warns and returns why."""
    q = arguments[0]
    try:
        with using("fused"):
            found = _outputs_and_gradients(function, arguments)
        with using("torch"):
            expected = _outputs_and_gradients(function, arguments)
        error = max(map(_relative_error, found, expected))
        if error <= TOLERANCE[q.dtype]:
            return None
        failure = f"it differs from the torch path by {error:.3g}, relative to the norm"
    except Exception as raised:  # compilers and drivers raise many kinds; the torch path still works
        failure = f"{type(raised).__name__}: {str(raised).strip()[:300]}"
    warnings.warn(
        f"The fused kernel of {operator!r} failed its check on {q.device} in {q.dtype}: {failure}. Using the torch "
        "path, which is correct but slower. Please report this with the output of `hf-rfattn doctor`.",
        stacklevel=4,
    )
    return failure


def _outputs_and_gradients(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Outputs and gradients of the operator with random tokens and a padding mask in place of the given ones."""
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)

        def tokens(x: Tensor) -> Tensor:
            new = torch.randn(2, x.shape[1], CHECK_LENGTH, x.shape[3], generator=generator)
            return new.to(x.device, x.dtype).requires_grad_()

        def copy(x: Any) -> Any:
            return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        q, k, v = map(tokens, arguments[:3])
        key_mask = torch.ones(2, CHECK_LENGTH, dtype=torch.bool, device=q.device)
        key_mask[1, : CHECK_LENGTH // 3] = False
        rest = tree_map(copy, arguments[3:])
        found = tree_leaves(function(q, k, v, *rest, key_mask=key_mask))
        found = [y for x in found for y in ([x] if isinstance(x, Tensor) else x.tensors())]  # or a state
        outputs = [x for x in found if x.requires_grad]
        total: Any = 0
        for x in outputs:
            weight = torch.randn(x.shape, generator=generator).to(x)
            total = total + (x * weight).masked_fill(x == -torch.inf, 0).sum()
        inputs = [x for x in (q, k, v, *tree_leaves(rest)) if isinstance(x, Tensor) and x.requires_grad]
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return [x.detach() for x in (*outputs, *gradients) if x is not None]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or not torch.equal(found.isinf(), expected.isinf()):
        return torch.inf
    a, b = (x.double().masked_fill(x.isinf(), 0) for x in (found, expected))
    error = float((a - b).norm() / b.norm().clamp(min=1e-6))
    return torch.inf if error != error else error
