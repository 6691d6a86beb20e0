"""Attention transfer: mechanisms learn from the softmax they replace."""

from .conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
