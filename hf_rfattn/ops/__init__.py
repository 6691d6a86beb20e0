"""Pure functions on `[B, H, L, D]` tensors; beside each fast one stands its naive definition (`ops.naive`)."""

from .banded_attention import banded_attention, exact_attention, global_attention
from .hadamard import hadamard_matrix, walsh_hadamard_transform
from .linear_attention import Features, State, combine, linear_attention, linear_multiply_adds, read_state, summarise
from .naive import allowed_pairs, normalised_weights
from .partial import Partial, merge, normalise
from .softmax_attention import softmax_attention

__all__ = [
    "Features",
    "Partial",
    "State",
    "allowed_pairs",
    "banded_attention",
    "combine",
    "exact_attention",
    "global_attention",
    "hadamard_matrix",
    "linear_attention",
    "linear_multiply_adds",
    "merge",
    "normalise",
    "normalised_weights",
    "read_state",
    "softmax_attention",
    "summarise",
    "walsh_hadamard_transform",
]
