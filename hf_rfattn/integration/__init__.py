"""All that touches transformers. Importing it registers our attention and mask functions and the checkpoint hooks."""

from .attention import register
from .checkpoint import install
from .error import AttentionError, attention_error, calibrate
from .patching import patch_model, unpatch_model
from .positions import extend_positions
from .redraw import keep_draws_when_averaging, redraw
from .selection import AttentionChoice, choose_attention
from .sharding import shard_sequence

register()
install()
keep_draws_when_averaging()

__all__ = [
    "AttentionChoice",
    "AttentionError",
    "attention_error",
    "calibrate",
    "choose_attention",
    "extend_positions",
    "patch_model",
    "redraw",
    "shard_sequence",
    "unpatch_model",
]
