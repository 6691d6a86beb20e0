"""Performer attention: positive random features whose products average to the softmax kernel.

φ(x)_r = M^(-1/2) exp(ω_rᵀx - |x|²/2), ω_r standard normal, so that E φ(x)ᵀφ(y) = exp(xᵀy).

Choromanski et al., "Rethinking Attention with Performers", ICLR 2021 (FAVOR+); Likhosherstov et al., "Chefs' Random
Tables: Non-Trigonometric Random Features", NeurIPS 2022 (the variance-optimal map, FAVOR++).
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..features import FeatureMap, LearnedPositiveFeatures, PositiveFeatures, ReluFeatures
from ..features.projections import Projection
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, default_features
from .registry import register_mechanism


@dataclass(frozen=True)
class FavorConfig(MechanismConfig):
    """Options of "favor+".

    `num_features`: length of φ, by default the head size. `projection`: how the rows of ω repel each other.
    `hadamard_blocks`: factors H·D of the Hadamard product. `kernel`: "softmax", or "relu" for the generalised attention
    of the paper. `antithetic`: ω in ± pairs. `variance`: "optimal" is FAVOR++, whose one statistic of the data
    `hf_rfattn.calibrate` measures. `redraw_interval`: optimizer steps between new draws; None keeps the first.
    `trainable`: ω, of queries and of keys, starts at the draw and is learned, and so is a temperature; no new ω are
    drawn then.
    """

    num_features: int | None = None
    projection: Projection = "orthogonal"
    hadamard_blocks: int = 3
    kernel: Literal["softmax", "relu"] = "softmax"
    antithetic: bool = False
    variance: Literal["standard", "optimal"] = "standard"
    redraw_interval: int | None = None
    trainable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_features", "hadamard_blocks", "redraw_interval")
        if self.kernel == "relu" and self.variance == "optimal":
            raise ValueError("variance='optimal' belongs to kernel='softmax'; leave it 'standard' with kernel='relu'.")
        if self.trainable and self.redraw_interval is not None:
            raise ValueError("A trainable projection is not drawn anew; leave redraw_interval out.")
        if self.trainable and (self.kernel, self.variance) != ("softmax", "standard"):
            raise ValueError("trainable=True belongs to kernel='softmax' and variance='standard'.")


class FavorAttention(LinearMechanism):
    def __init__(
        self,
        config: FavorConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        seed: tuple[int, ...],
    ):
        count = default_features(config.num_features, head_dim, config.antithetic, "antithetic features come in pairs")
        draw: dict[str, Any] = {
            "projection": config.projection,
            "hadamard_blocks": config.hadamard_blocks,
            "antithetic": config.antithetic,
        }
        sizes, interval = (num_kv_heads, count, head_dim, seed), config.redraw_interval
        feature_map: FeatureMap
        if config.trainable:
            feature_map = LearnedPositiveFeatures(num_heads, *sizes, **draw)
        elif config.kernel == "relu":
            feature_map = ReluFeatures(*sizes, redraw_interval=interval, **draw)
        else:
            optimal = config.variance == "optimal"
            feature_map = PositiveFeatures(*sizes, optimal=optimal, redraw_interval=interval, **draw)
        super().__init__(
            config,
            feature_map,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seed=seed,
        )


register_mechanism("favor+", FavorConfig, FavorAttention, aliases={"performer": {}, "favor": {}})
