"""Linear attention with the second-order Taylor polynomial of exp, on learned projections of queries and keys.

φ(x) = [1, z, z_i z_j for i ≤ j (divided by √2 where i = j)] with z = Wx + b, so that φ(x)ᵀφ(y) = 1 + s + s²/2 with
s = z(x)ᵀz(y). The polynomial is never below 1/2, so denominators cannot vanish although features are signed.

Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", ICML 2024 (Based);
Zhang et al., "The Hedgehog & the Porcupine", ICLR 2024.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.learned import AffineFeatures
from ..features.maps import per_head_product
from ..ops import Features
from .base import LinearMechanism
from .config import MechanismConfig, check_at_least, option
from .registry import register_mechanism


@dataclass(frozen=True)
class TaylorConfig(MechanismConfig):
    """Options of "taylor"."""

    rank: int | None = option(None, "Size R of the projection; there are (R + 1)(R + 2) / 2 features. Default: 16.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "rank")


class TaylorFeatures(AffineFeatures):
    """Monomials of up to second order of z = Wx + b."""

    positive = False
    log_features = False

    def __init__(self, num_heads: int, num_kv_heads: int, rank: int, head_dim: int, seed: tuple[int, ...]):
        super().__init__(num_heads, num_kv_heads, rank, head_dim, seed)
        self.num_features = (rank + 1) * (rank + 2) // 2

    def features(self, x: Tensor, role: str, scale: float, weight: Tensor, bias: Tensor) -> Features:
        z = per_head_product(x, weight, scale) + bias.to(x.dtype)[:, None]
        rows, columns = torch.triu_indices(z.shape[-1], z.shape[-1], device=z.device)
        products = z[..., rows] * z[..., columns] * torch.where(rows == columns, 0.5**0.5, 1.0).to(z.dtype)
        return Features(torch.zeros_like(z[..., :1]), torch.cat([F.pad(z, (1, 0), value=1.0), products], dim=-1))

    def floor(self) -> Tensor:
        """The minimum of 1 + s + s²/2."""
        return torch.full((1, 1, 1), 0.5, device="cpu")

    def multiply_adds(self) -> int:
        return super().multiply_adds() + self.num_features


class TaylorAttention(LinearMechanism):
    def __init__(self, config: TaylorConfig, *, head_dim: int, **shape: Any):
        rank = 16 if config.rank is None else config.rank
        feature_map = TaylorFeatures(shape["num_heads"], shape["num_kv_heads"], rank, head_dim, shape["seed"])
        super().__init__(config, feature_map, head_dim=head_dim, **shape)


register_mechanism("taylor", TaylorConfig, TaylorAttention)
