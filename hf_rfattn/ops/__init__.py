"""Pure functions on `[B, H, L, D]` tensors; `ops.naive` has the dense definition of each."""

from .banded import banded_attention, global_attention, with_global_rows
from .causal import TILE, causal_linear_attention, linear_multiply_adds
from .hadamard import hadamard_matrix, walsh_hadamard_transform
from .linear import FeatureFunction, Features, State, Sums, linear_attention
from .masks import global_keys
from .softmax import attend, merge, softmax_attention

__all__ = [
    "TILE",
    "FeatureFunction",
    "Features",
    "State",
    "Sums",
    "attend",
    "banded_attention",
    "causal_linear_attention",
    "global_attention",
    "global_keys",
    "hadamard_matrix",
    "linear_attention",
    "linear_multiply_adds",
    "merge",
    "softmax_attention",
    "walsh_hadamard_transform",
    "with_global_rows",
]
