"""Integration with transformers. Importing it registers our attention and mask functions and wraps some methods."""

from . import checkpoint
from .error import AttentionError, attention_error, calibrate
from .patching import patch_model, unpatch_model
from .positions import extend_positions
from .redraw import redraw
from .selection import AttentionChoice, choose_attention
from .sharding import shard_sequence
