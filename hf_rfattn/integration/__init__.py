"""All that touches transformers. Importing this package registers the attention and mask functions."""

from .attention import register
from .error import AttentionError, attention_error, calibrate
from .patching import patch_model, unpatch_model
from .redraw import redraw

register()

__all__ = ["AttentionError", "attention_error", "calibrate", "patch_model", "redraw", "unpatch_model"]
