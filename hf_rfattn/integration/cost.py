"""Cost of attention modules by sequence length, in multiply-adds and bytes, compared with softmax.

These are counts, not measurements: fewer operations do not always mean less time.
"""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..mechanisms import Mechanism
from .discovery import AttentionSite

_LONGEST = 2**40


class AttentionCost(NamedTuple):
    """Cost of one attention module on one sequence; memory is the size of its generation cache in bytes."""

    multiply_adds: int
    softmax_multiply_adds: int
    memory: int
    softmax_memory: int


def attention_cost(
    mechanism: Mechanism, length: int, *, causal: bool, dtype: torch.dtype = torch.float32
) -> AttentionCost:
    """Return the cost of a mechanism (all heads) on one sequence, for a model in `dtype`.

    >>> from hf_rfattn import build_mechanism
    >>> llama_like = build_mechanism("favor+", num_heads=32, num_kv_heads=8, head_dim=128)
    >>> cost = attention_cost(llama_like, 8192, causal=True, dtype=torch.bfloat16)
    >>> cost.softmax_memory, cost.memory  # bytes per layer: keys and values of 8192 tokens, or one state
    (33554432, 532480)
    """
    heads, kv_heads, head_dim = mechanism.num_heads, mechanism.num_kv_heads, mechanism.head_dim
    if mechanism.holds_all_keys:
        state = mechanism.new_state(1, head_dim, dtype, "meta", length)  # type: ignore[call-arg]
    else:
        state = mechanism.new_state(1, head_dim, torch.promote_types(dtype, torch.float32), "meta")
    return AttentionCost(
        multiply_adds=heads * mechanism.multiply_adds(length, causal),
        softmax_multiply_adds=heads * head_dim * length * (length + 1 if causal else 2 * length),
        memory=sum(tensor.nbytes for tensor in state.tensors()),
        softmax_memory=kv_heads * length * 2 * head_dim * dtype.itemsize,
    )


def crossover_length(modules: Iterable[tuple[Mechanism, bool]]) -> int | None:
    """Break-even length from which (mechanism, causal) modules need fewer multiply-adds than softmax; None if never.

    >>> from hf_rfattn import build_mechanism
    >>> crossover_length([(build_mechanism("band", num_heads=2, head_dim=8, bandwidth=16, global_tokens=0), False)])
    34
    """
    modules = list(modules)

    def lower(length: int) -> bool:
        costs = [attention_cost(mechanism, length, causal=causal) for mechanism, causal in modules]
        return sum(c.multiply_adds for c in costs) < sum(c.softmax_multiply_adds for c in costs)

    first = 1 + bisect.bisect_left(range(1, _LONGEST), True, key=lower)
    return None if first == _LONGEST else first


def is_causal(site: AttentionSite) -> bool:
    """Whether a module is causal according to its attributes. In a forward pass, the masks decide."""
    flags = (getattr(site.module, name, False) for name in ("is_causal", "is_decoder"))
    return not site.cross and any(flag is True for flag in flags)
