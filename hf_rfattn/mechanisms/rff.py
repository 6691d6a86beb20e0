"""Random Fourier feature attention: an estimate of a shift-invariant kernel by Bochner's theorem.

φ(x) = R^(-1/2) [sin ωᵀx, cos ωᵀx], so that E φ(x)ᵀφ(y) = K(x - y); for the Gaussian, exp(xᵀy) = exp(|x|²/2)
exp(|y|²/2) K(x - y).

Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007; Peng et al., "Random Feature
Attention", ICLR 2021.
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..features import FourierFeatures
from ..features.projections import Projection
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, default_features, option
from .registry import register_mechanism


@dataclass(frozen=True)
class RffConfig(MechanismConfig):
    """Options of "rff"."""

    num_features: int | None = option(None, "Number of random features M. Default: the head size.")
    kernel: Literal["gaussian", "laplace", "cauchy"] = option("gaussian", "Shift-invariant kernel of queries and keys.")
    projection: Projection | None = option(
        None, "How the frequencies are drawn. Default: orthogonal for the Gaussian kernel, iid for the others."
    )
    hadamard_blocks: int = option(3, "Number of factors H·D in a Hadamard projection.")
    form: Literal["sincos", "cos"] = option("sincos", "Pairs of sine and cosine, or cosines with a random phase.")
    normalize_qk: bool = option(
        True, "Normalise queries and keys to unit length, with a learned temperature. False gives large errors."
    )
    redraw_interval: int | None = option(None, "Redraw frequencies after this many optimizer steps. Default: never.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_features", "hadamard_blocks", "redraw_interval")
        if self.kernel != "gaussian" and self.projection not in (None, "iid"):
            raise ValueError(
                f"projection={self.projection!r} is only possible with kernel='gaussian'; kernel={self.kernel!r} needs "
                "projection='iid'."
            )


class RffAttention(LinearMechanism):
    def __init__(self, config: RffConfig, *, num_kv_heads: int, head_dim: int, seed: tuple[int, ...], **shape: Any):
        even = config.form == "sincos"
        count = default_features(config.num_features, head_dim, even, "sines and cosines come in pairs")
        feature_map = FourierFeatures(
            num_kv_heads,
            count,
            head_dim,
            seed,
            kernel=config.kernel,
            projection=config.projection or ("orthogonal" if config.kernel == "gaussian" else "iid"),
            hadamard_blocks=config.hadamard_blocks,
            form=config.form,
            normalize_qk=config.normalize_qk,
            redraw_interval=config.redraw_interval,
        )
        super().__init__(config, feature_map, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=seed, **shape)


register_mechanism("rff", RffConfig, RffAttention)
