"""Hedgehog: a learned feature map per head that starts spiky, like softmax, and is taught to imitate it.

φ(x) = [softmax(Wx), softmax(-Wx)], W starting at the identity, with a W of its own for queries and for keys.

Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry", ICLR 2024.
"""

from dataclasses import dataclass
from typing import Any

from ..features import HedgehogFeatures
from .base import LinearMechanism
from .config import MechanismConfig
from .registry import register_mechanism


@dataclass(frozen=True)
class HedgehogConfig(MechanismConfig):
    """Options of "hedgehog": none yet; φ has twice the head size."""


class HedgehogAttention(LinearMechanism):
    def __init__(self, config: HedgehogConfig, *, num_heads: int, num_kv_heads: int, head_dim: int, **shape: Any):
        feature_map = HedgehogFeatures(num_heads, num_kv_heads, head_dim)
        super().__init__(
            config, feature_map, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **shape
        )


register_mechanism("hedgehog", HedgehogConfig, HedgehogAttention)
