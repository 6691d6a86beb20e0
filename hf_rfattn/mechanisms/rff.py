"""Random Fourier feature attention: a shift-invariant kernel of queries and keys by Bochner's theorem.

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
        None, "How frequencies are drawn. Default: orthogonal for the Gaussian kernel, iid for the others."
    )
    hadamard_blocks: int = option(3, "Number of factors H·D in a Hadamard projection.")
    form: Literal["sincos", "cos"] = option("sincos", "Pairs of sine and cosine, or cosines with a random phase.")
    normalize_qk: bool = option(
        True, "Normalise queries and keys to length 1, with a learned temperature. Without it the error is large."
    )
    redraw_interval: int | None = option(None, "Optimizer steps between new draws; null keeps the first draw.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_features", "hadamard_blocks", "redraw_interval")
        if self.kernel != "gaussian" and self.projection not in (None, "iid"):
            raise ValueError(
                f"The frequencies of the {self.kernel} kernel are independent by coordinate: projection must be "
                f"'iid', not {self.projection!r}."
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
