"""Attention transfer: trains mechanisms to imitate the softmax attention they replace."""

from .conversion import Conversion, convert
from .heads import keep_exact_heads
