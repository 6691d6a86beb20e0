"""Attention transfer: mechanisms learn from the softmax they replace."""

from .conversion import Conversion, convert
