"""Trainable feature maps with parameters per head, trained by attention transfer or together with the model.

Queries and keys have separate parameters.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import Features
from ..ops.fused import Landmarks
from .maps import FeatureMap, LogLinearFeatures, Role, per_head_product, per_query_head
from .projections import Projection, draw_projection, seeded_generator


class AffineFeatures(FeatureMap):
    """Base class of maps that are functions of Wx + b, with W `[heads, rows, D]` and b learned per head and role.

    W starts as the identity, followed by random orthogonal rows if there are more than D rows, or as random orthogonal
    rows only if there are fewer. b starts at zero.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, rows: int, head_dim: int, seed: tuple[int, ...]):
        super().__init__()
        self.seed = seed
        self.query_weight = nn.Parameter(torch.empty(num_heads, rows, head_dim))
        self.key_weight = nn.Parameter(torch.empty(num_kv_heads, rows, head_dim))
        self.query_bias = nn.Parameter(torch.empty(num_heads, rows))
        self.key_bias = nn.Parameter(torch.empty(num_kv_heads, rows))
        self.reset_parameters()

    def tensors(self, role: Role) -> tuple[Tensor, Tensor]:
        return (self.query_weight, self.query_bias) if role == "query" else (self.key_weight, self.key_bias)

    def multiply_adds(self) -> int:
        return self.query_weight.shape[1] * self.query_weight.shape[2]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to the initial values."""
        if self.query_weight.is_meta:
            return  # a checkpoint will fill them
        rows, head_dim = self.query_weight.shape[1:]
        start = torch.eye(head_dim, device="cpu")  # projections are drawn on the CPU
        if rows != head_dim:
            drawn = draw_projection("orthogonal", 1, rows, head_dim, seeded_generator(*self.seed))[0].float()
            drawn = F.normalize(drawn, dim=-1)
            start = torch.cat([start, drawn])[:rows] if rows > head_dim else drawn
        for weight, bias in ((self.query_weight, self.query_bias), (self.key_weight, self.key_bias)):
            _fill(weight, start.repeat(len(weight), 1, 1))
            bias.zero_()


class HedgehogFeatures(AffineFeatures):
    """φ(x) = [softmax(Wx + b), softmax(-Wx - b)]."""

    def __init__(self, num_heads: int, num_kv_heads: int, num_features: int, head_dim: int, seed: tuple[int, ...]):
        super().__init__(num_heads, num_kv_heads, num_features // 2, head_dim, seed)
        self.num_features = num_features

    def features(self, x: Tensor, role: str, scale: float, weight: Tensor, bias: Tensor) -> Features:
        x = per_head_product(x, weight, scale) + bias.to(x.dtype)[:, None]
        return Features(torch.cat([F.log_softmax(x, dim=-1), F.log_softmax(-x, dim=-1)], dim=-1))

    def landmarks(self, x: Tensor, role: str, scale: float, weight: Tensor, bias: Tensor) -> list[Landmarks]:
        bias = bias.unsqueeze(1)
        return [Landmarks(weight, bias, None), Landmarks(-weight, -bias, None)]


START_TEMPERATURE = 0.25  # trained from here, real heads come closer to softmax than from 1


class LearnedPositiveFeatures(LogLinearFeatures):
    """φ(x)_r = M^(-1/2) exp(τ^(1/2) ω_rᵀx - τ|x|²/2): FAVOR+ for the kernel exp(τ xᵀy), with ω and τ learned.

    ω is learned per head and role, and starts at the random draw of FAVOR+. τ is learned per key head; τ = 1 is FAVOR+.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        num_features: int,
        head_dim: int,
        seed: tuple[int, ...],
        *,
        projection: Projection = "orthogonal",
        hadamard_blocks: int = 3,
        antithetic: bool = False,
    ):
        super().__init__()
        self.num_features, self.seed, self.antithetic = num_features, seed, antithetic
        self.kind, self.hadamard_blocks = projection, hadamard_blocks
        rows = num_features // 2 if antithetic else num_features
        self.query_projection = nn.Parameter(torch.empty(num_heads, rows, head_dim))
        self.key_projection = nn.Parameter(torch.empty(num_kv_heads, rows, head_dim))
        self.log_temperature = nn.Parameter(torch.empty(num_kv_heads))
        self.reset_parameters()

    def tensors(self, role: Role) -> tuple[Tensor | None, ...]:
        weight: Tensor = self.query_projection if role == "query" else self.key_projection
        log = self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32))
        temperature = per_query_head(log, len(weight)).exp()[:, None, None]
        weight = weight * temperature.sqrt()
        return torch.cat([weight, -weight], dim=1) if self.antithetic else weight, None, temperature

    def multiply_adds(self) -> int:
        return self.key_projection.shape[1] * self.key_projection.shape[2]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to the initial draw and temperature."""
        if self.key_projection.is_meta:
            return  # a checkpoint will fill it
        kv_heads, rows, head_dim = self.key_projection.shape
        generator = seeded_generator(*self.seed, 0)
        drawn = draw_projection(self.kind, kv_heads, rows, head_dim, generator, self.hadamard_blocks)
        _fill(self.query_projection, drawn.repeat_interleave(len(self.query_projection) // kv_heads, dim=0))
        _fill(self.key_projection, drawn)
        self.log_temperature.fill_(math.log(START_TEMPERATURE))


def _fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a value into a parameter; if FSDP has sharded it, into the local shard."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    parameter.copy_(value)
