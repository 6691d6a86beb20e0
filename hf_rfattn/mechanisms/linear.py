"""Linear attention with a fixed elementwise map: φ(x) = elu(x) + 1, elu(-x) + 1 or tanh(x).

Katharopoulos et al., "Transformers are RNNs", ICML 2020; the other two maps are far fields of Nguyen et al.,
"FMMformer", NeurIPS 2021.
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..features import EluFeatures, FeatureMap, TanhFeatures
from .base import LinearMechanism
from .config import MechanismConfig, option
from .registry import register_mechanism


@dataclass(frozen=True)
class LinearConfig(MechanismConfig):
    """Options of "linear"."""

    feature_map: Literal["elu", "elu-", "tanh"] = option(
        "elu", "elu(x) + 1, elu(-x) + 1 or tanh(x). tanh is signed, so its denominator is kept away from 0."
    )


class LinearAttention(LinearMechanism):
    def __init__(self, config: LinearConfig, *, head_dim: int, **shape: Any):
        feature_map: FeatureMap
        if config.feature_map == "tanh":
            feature_map = TanhFeatures(head_dim)
        else:
            feature_map = EluFeatures(head_dim, sign=-1 if config.feature_map == "elu-" else 1)
        super().__init__(config, feature_map, head_dim=head_dim, **shape)


register_mechanism(
    "linear",
    LinearConfig,
    LinearAttention,
    aliases={"elu": {"feature_map": "elu"}, "elu-": {"feature_map": "elu-"}, "tanh": {"feature_map": "tanh"}},
)
