"""Performer attention: positive random features, an unbiased estimate of the softmax kernel.

φ(x)_r = M^(-1/2) exp(ω_rᵀx - |x|²/2), ω_r standard normal, so that E φ(x)ᵀφ(y) = exp(xᵀy).

Choromanski et al., "Rethinking Attention with Performers", ICLR 2021 (FAVOR+); Likhosherstov et al., "Chefs' Random
Tables: Non-Trigonometric Random Features", NeurIPS 2022 (the variance-optimal map, FAVOR++).
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..features import FeatureMap, LearnedPositiveFeatures, PositiveFeatures, ReluFeatures
from ..features.projections import Projection
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, default_features, option
from .registry import register_mechanism


@dataclass(frozen=True)
class FavorConfig(MechanismConfig):
    """Options of "favor+"."""

    num_features: int | None = option(None, "Number of random features M. Default: the head size.")
    projection: Projection = option(
        "orthogonal", "How the rows ω are drawn: iid (independent), orthogonal, or hadamard."
    )
    hadamard_blocks: int = option(3, "Number of factors H·D in a Hadamard projection.")
    kernel: Literal["softmax", "relu"] = option("softmax", "relu is the generalised attention of the Performer paper.")
    antithetic: bool = option(False, "Draw ω in pairs of opposite sign.")
    variance: Literal["standard", "optimal"] = option(
        "standard", "optimal: FAVOR++, which `hf_rfattn.calibrate` fits to your data."
    )
    redraw_interval: int | None = option(None, "Redraw ω after this many optimizer steps. Default: never.")
    trainable: bool = option(
        False, "Train ω (separately for queries and keys) and a temperature. Cannot be combined with redraw_interval."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_features", "hadamard_blocks", "redraw_interval")
        if self.kernel == "relu" and self.variance == "optimal":
            raise ValueError("variance='optimal' needs kernel='softmax'; use variance='standard' with kernel='relu'.")
        if self.trainable and self.redraw_interval is not None:
            raise ValueError("redraw_interval cannot be combined with trainable=True; leave one of them out.")
        if self.trainable and (self.kernel, self.variance) != ("softmax", "standard"):
            raise ValueError("trainable=True needs kernel='softmax' and variance='standard'.")


class FavorAttention(LinearMechanism):
    def __init__(self, config: FavorConfig, *, num_kv_heads: int, head_dim: int, seed: tuple[int, ...], **shape: Any):
        count = default_features(config.num_features, head_dim, config.antithetic, "antithetic features come in pairs")
        draw: dict[str, Any] = {
            "projection": config.projection,
            "hadamard_blocks": config.hadamard_blocks,
            "antithetic": config.antithetic,
        }
        sizes, interval = (num_kv_heads, count, head_dim, seed), config.redraw_interval
        feature_map: FeatureMap
        if config.trainable:
            feature_map = LearnedPositiveFeatures(shape["num_heads"], *sizes, **draw)
        elif config.kernel == "relu":
            feature_map = ReluFeatures(*sizes, redraw_interval=interval, **draw)
        else:
            optimal = config.variance == "optimal"
            feature_map = PositiveFeatures(*sizes, optimal=optimal, redraw_interval=interval, **draw)
        super().__init__(config, feature_map, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=seed, **shape)


register_mechanism("favor+", FavorConfig, FavorAttention, aliases={"performer": {}, "favor": {}})
