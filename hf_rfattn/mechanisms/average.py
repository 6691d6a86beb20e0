"""Control: the average of all visible values, without any attention.

φ(x) = 1. A mechanism that does not beat this control gains nothing from its attention.
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
    needs_training = False  # it has nothing to train

    def __init__(self, config: AverageConfig, **shape: Any):
        super().__init__(config, ConstantFeatures(), **shape)


register_mechanism("average", AverageConfig, AverageAttention)
