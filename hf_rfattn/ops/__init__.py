"""Pure functions on `[B, H, L, D]` tensors; beside the fast ones stands their naive definition (`ops.naive`)."""

from .banded_attention import exact_attention, global_attention
from .blocks import FarField, summarise
from .blockwise import attend_in_blocks
from .causal import attend_to_past
from .hadamard import hadamard_matrix, walsh_hadamard_transform
from .inputs import Inputs, visible_keys
from .linear_attention import TILE, Features, State, add_key, combine, linear_multiply_adds, read_state
from .naive import allowed_pairs, normalised_weights
from .partial import Partial, merge, normalise
from .scratch import product
from .softmax_attention import softmax_attention
from .two_softmaxes import attend_to_all

__all__ = [
    "TILE",
    "FarField",
    "Features",
    "Inputs",
    "Partial",
    "State",
    "add_key",
    "allowed_pairs",
    "attend_in_blocks",
    "attend_to_all",
    "attend_to_past",
    "combine",
    "exact_attention",
    "global_attention",
    "hadamard_matrix",
    "linear_multiply_adds",
    "merge",
    "normalise",
    "normalised_weights",
    "product",
    "read_state",
    "softmax_attention",
    "summarise",
    "visible_keys",
    "walsh_hadamard_transform",
]
