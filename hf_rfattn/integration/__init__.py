"""All that touches transformers. Importing it registers our attention and mask functions and the checkpoint hooks."""

from .attention import register
from .checkpoint import install
from .error import AttentionError, attention_error, calibrate
from .patching import patch_model, unpatch_model
from .positions import extend_positions
from .redraw import keep_draws_when_averaging, redraw
from .selection import AttentionChoice, choose_attention

register()
install()
keep_draws_when_averaging()
