"""A control: no attention at all, every visible value weighs the same.

φ(x) = 1. What a mechanism gains over this row is what its attention is worth.
"""

from dataclasses import dataclass
from typing import Any

from ..features import ConstantFeatures
from .base import LinearMechanism
from .config import MechanismConfig
from .registry import register_mechanism


@dataclass(frozen=True)
class AverageConfig(MechanismConfig):
    """ "average" has no options."""


class AverageAttention(LinearMechanism):
    needs_training = False  # it stays what it is

    def __init__(self, config: AverageConfig, **shape: Any):
        super().__init__(config, ConstantFeatures(), **shape)


register_mechanism("average", AverageConfig, AverageAttention)
