"""Hedgehog: linear attention with a feature map per head that is trained to imitate softmax.

φ(x) = [softmax(Wx + b), softmax(-Wx - b)]. W starts at the identity; queries and keys have separate parameters.

Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry", ICLR 2024.
"""

from dataclasses import dataclass
from typing import Any

from ..features import HedgehogFeatures
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, default_features, option
from .registry import register_mechanism


@dataclass(frozen=True)
class HedgehogConfig(MechanismConfig):
    """Options of "hedgehog"."""

    num_features: int | None = option(None, "Number of features M, which must be even. Default: twice the head size.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 2, "num_features")


class HedgehogAttention(LinearMechanism):
    def __init__(self, config: HedgehogConfig, *, head_dim: int, **shape: Any):
        count = default_features(config.num_features, 2 * head_dim, True, "features come in pairs, of Wx and of -Wx")
        heads = shape["num_heads"], shape["num_kv_heads"]
        feature_map = HedgehogFeatures(*heads, count, head_dim, shape["seed"])
        super().__init__(config, feature_map, head_dim=head_dim, **shape)


register_mechanism("hedgehog", HedgehogConfig, HedgehogAttention)
