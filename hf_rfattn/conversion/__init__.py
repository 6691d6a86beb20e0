"""Attention transfer: mechanisms learn from the softmax they replace."""

from .convert import convert
from .report import Conversion

__all__ = ["Conversion", "convert"]
