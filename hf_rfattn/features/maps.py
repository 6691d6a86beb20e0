"""Feature maps φ, where φ(x)ᵀφ(y) replaces the attention kernel, computed in log space (`ops.Features`).

A map is called with a role and a factor for tokens (the square root of the scale of the scores), and returns φ as a
function of tokens. There is one random projection per key head, so query heads that share a key head use the same one.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ops import FeatureFunction, Features
from ..ops.fused import Landmarks
from ..ops.linear import compute_dtype
from .projections import Projection, draw_projection, seeded_generator

Role = Literal["query", "key"]

SIGNED_FLOOR = 0.01  # smaller mean kernel values are noise for any practical number of signed features


def per_head_product(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """scale · Wx: `[B, H, L, D]`, `[heads, M, D]` → `[B, H, L, M]`; query heads may share the weight of a key head."""
    weight = scale * weight.to(x.dtype).mT
    B, H, L, D = x.shape
    return (x.reshape(B, len(weight), H // len(weight) * L, D) @ weight).reshape(B, H, L, weight.shape[-1])


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat values of key heads for the query heads that share them: `[Hkv, …]` → `[H, …]`."""
    return x if len(x) == heads else x.repeat_interleave(heads // len(x), 0)


class FeatureMap(nn.Module):
    """Base class of feature maps. Subclasses define `features` and, if they have parameters or buffers, `tensors`.

    >>> phi = EluFeatures(head_dim=8)("query")
    >>> phi(torch.zeros(1, 2, 5, 8)).dense().shape
    torch.Size([1, 2, 5, 8])
    """

    num_features: int
    positive: bool = True
    log_features: bool = True  # whether `features` returns one logarithm per feature, or one per token and a factor
    pull: Any = None  # optional method: backpropagates the gradient of log-features to tokens, faster than autograd
    landmarks: Any = None  # optional method: the features as groups of log-linear functions, for fused kernels

    def forward(self, role: Role, scale: float = 1.0) -> FeatureFunction:
        """Return the function x ↦ φ(scale · x) for operators."""
        tensors = self.tensors(role)
        if self._parameters and not tensors:
            raise NotImplementedError(
                f"{type(self).__name__} has parameters, but its `tensors(role)` returns none. Return them there, so "
                "that `features` receives them as arguments; otherwise they would not be trained."
            )
        floor = None if self.log_features else self.floor()
        size = self.num_features + (floor is not None)
        return FeatureFunction(self, role, scale, tensors, floor, self.log_features, size)

    def tensors(self, role: Role) -> tuple[Tensor | None, ...]:
        """Return all parameters and buffers that φ reads, or tensors computed from them."""
        return ()

    def features(self, x: Tensor, role: str, scale: float, *tensors: Any) -> Features:
        """Compute φ(scale · x) for tokens `[B, H, L, D]`. A pure function of each token that reads `tensors`, not the
        attributes of the map. For queries, φ may leave out a positive factor per token; `query_offset` then
        returns its log.
        """
        raise NotImplementedError

    def query_offset(self, x: Tensor, scale: float, *tensors: Any) -> Tensor | float:
        """The logarithm of the factor that `features` omits for queries, `[B, H, L, 1]`."""
        return 0.0

    def floor(self) -> Tensor | None:
        """For signed maps, the smallest magnitude of the denominator per unit of key weight, `[Hkv or 1, 1, 1]`."""
        return None

    def multiply_adds(self) -> int:
        """Multiply-adds per token and head for the features."""
        return 0


class ConstantFeatures(FeatureMap):
    """φ(x) = 1: all visible keys have the same weight."""

    num_features = 1

    def features(self, x: Tensor, role: str, scale: float) -> Features:
        return Features(torch.zeros_like(x[..., :1]))


class EluFeatures(FeatureMap):
    """φ(x) = elu(±x) + 1, that is exp(x) below zero and 1 + x above."""

    def __init__(self, head_dim: int, sign: int = 1):
        super().__init__()
        self.num_features = head_dim
        self.sign = sign

    def features(self, x: Tensor, role: str, scale: float) -> Features:
        x = (self.sign * scale) * x
        return Features(torch.where(x > 0, torch.log1p(x.clamp(min=0)), x))


class TanhFeatures(FeatureMap):
    """φ(x) = tanh(x), which is signed."""

    positive = False
    log_features = False

    def __init__(self, head_dim: int):
        super().__init__()
        self.num_features = head_dim

    def features(self, x: Tensor, role: str, scale: float) -> Features:
        return Features(torch.zeros_like(x[..., :1]), torch.tanh(scale * x))

    def floor(self) -> Tensor:
        return torch.full((1, 1, 1), SIGNED_FLOOR, device="cpu")


class LogLinearFeatures(FeatureMap):
    """φ(x)_r = M^(-1/2) exp(ω_rᵀx + b_r - τ|x|²/2), with ω `[heads, M, D]`, b `[heads, 1, M]` (None: 0) and τ
    `[heads, 1, 1]` (None: 1).
    """

    def features(
        self, x: Tensor, role: str, scale: float, weight: Tensor, bias: Tensor | None, temperature: Tensor | None
    ) -> Features:
        log = per_head_product(x, weight, scale)
        if bias is not None:
            log.add_(per_query_head(bias.to(x.dtype), x.shape[1]))
        return Features(log if role == "query" else log.add_(self.query_offset(x, scale, weight, bias, temperature)))

    def query_offset(
        self, x: Tensor, scale: float, weight: Tensor, bias: Tensor | None, temperature: Tensor | None
    ) -> Tensor:
        """-τ|x|²/2 - log M / 2, which `features` includes for keys."""
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * (-(scale**2) / 2)
        if temperature is not None:
            norms = norms * per_query_head(temperature.to(x.dtype), x.shape[1])
        return norms - math.log(weight.shape[1]) / 2

    def landmarks(self, x, role, scale, weight, bias, temperature):
        offset = 0.0 if role == "query" else self.query_offset(x.to(compute_dtype(x)), scale, weight, bias, temperature)
        return [Landmarks(weight, bias, offset)]

    def pull(self, x, role, scale, gradient, weight, bias, temperature):
        product = per_head_product(gradient, weight.mT, scale)
        if role == "query":
            return product
        total = gradient.sum(-1, keepdim=True)
        if temperature is not None:
            total = total * per_query_head(temperature.to(x.dtype), x.shape[1])
        return product.addcmul_(x, total, value=-(scale**2))


class RandomFeatures(FeatureMap):
    """A map with random buffers, seeded by (seed, layer, …, number of the draw), in pairs of opposite sign if
    `antithetic`. Subclasses call `reset_parameters()` at the end of `__init__`.
    """

    projection: Tensor  # [Hkv, rows, D]
    draws: Tensor  # number of redraws
    steps: Tensor  # training steps since the last draw

    def __init__(
        self,
        num_kv_heads: int,
        num_features: int,
        head_dim: int,
        seed: tuple[int, ...],
        *,
        projection: Projection = "orthogonal",
        hadamard_blocks: int = 3,
        antithetic: bool = False,
        redraw_interval: int | None = None,
    ):
        super().__init__()
        self.version = 0  # changes with the map, since a generation state is only valid for one version
        self.num_features, self.seed, self.antithetic = num_features, seed, antithetic
        self.kind, self.hadamard_blocks, self.redraw_interval = projection, hadamard_blocks, redraw_interval
        rows = num_features // 2 if antithetic else num_features
        self.register_buffer("projection", torch.empty(num_kv_heads, rows, head_dim))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw new values of the random buffers."""
        heads, rows, dim = self.projection.shape
        return {"projection": draw_projection(self.kind, heads, rows, dim, generator, self.hadamard_blocks)}

    @torch.no_grad()
    def draw(self) -> None:
        """Fill the random buffers with draw number `draws`."""
        if not self.projection.is_meta:  # otherwise a checkpoint fills them
            for name, value in self.sample(seeded_generator(*self.seed, int(self.draws))).items():
                getattr(self, name).copy_(value)

    def redraw(self) -> None:
        """Fill the random buffers with the next draw."""
        self.version += 1
        self.draws += 1
        self.steps.zero_()
        self.draw()

    def step(self) -> None:
        """Count a training step, and redraw first if `redraw_interval` steps have passed."""
        if int(self.steps) >= (self.redraw_interval or math.inf):
            self.redraw()
        self.steps += 1

    def multiply_adds(self) -> int:
        return self.projection.shape[1] * self.projection.shape[2]

    def reset_parameters(self) -> None:
        """Reset to the first draw."""
        self.draws.zero_()
        self.steps.zero_()
        self.draw()


class PositiveFeatures(RandomFeatures, LogLinearFeatures):
    """FAVOR+: φ(x)_r = M^(-1/2) exp(ω_rᵀx - |x|²/2), E φ(x)ᵀφ(y) = exp(xᵀy).

    `optimal`: FAVOR++, f = (1-4A)^(d/4) exp(A|ω|² + sqrt(1-4A) ωᵀx - |x|²/2), where A depends on ρ, the mean of
    |x+y|²/d, stored per key head in the buffer `rho`. ρ = 0 gives FAVOR+; the features are unbiased for every ρ.
    """

    rho: Tensor

    def __init__(self, num_kv_heads: int, *sizes: Any, optimal: bool = False, **draw: Any):
        super().__init__(num_kv_heads, *sizes, **draw)
        self.optimal = optimal
        if optimal:
            self.register_buffer("rho", torch.empty(num_kv_heads))
        self.reset_parameters()

    def tensors(self, role: Role) -> tuple[Tensor | None, ...]:
        weight, bias = self.projection, None
        if self.optimal:
            rho = self.rho.to(torch.promote_types(self.rho.dtype, torch.float32))[:, None, None]
            a = (1 - 2 * rho - torch.sqrt((2 * rho + 1).square() + 8 * rho)) / 16
            bias = a * weight.to(rho.dtype).square().sum(-1).unsqueeze(1) + weight.shape[-1] / 4 * torch.log1p(-4 * a)
            weight = weight.to(rho.dtype) * torch.sqrt(1 - 4 * a)
        if self.antithetic:
            weight = torch.cat([weight, -weight], dim=1)
            bias = None if bias is None else torch.cat([bias, bias], dim=2)
        return weight, bias, None

    @torch.no_grad()
    def calibrate(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> None:
        """Set ρ to the mean of |x_i + y_j|²/d over the visible queries and keys of a batch."""
        weight = torch.ones_like(y[:, :1, :, :1]) if key_mask is None else key_mask[:, None, :, None].to(y.dtype)
        q_weight = weight if x.shape[2] == y.shape[2] else torch.ones_like(x[:, :1, :, :1])
        total, q_total = weight.sum((0, 2)), q_weight.sum((0, 2))  # [1, 1]
        kv_heads = y.shape[1]
        x_mean = ((x * q_weight).sum((0, 2)) / q_total).view(kv_heads, -1, x.shape[-1]).mean(1)
        x_norm = ((x * q_weight).square().sum((0, 2)) / q_total).view(kv_heads, -1, x.shape[-1]).mean(1)
        y_mean = (y * weight).sum((0, 2)) / total
        y_norm = (y * weight).square().sum((0, 2)) / total
        self.version += 1
        self.rho.copy_((x_norm + y_norm + 2 * x_mean * y_mean).mean(-1))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.optimal:
            self.rho.fill_(1)


class ReluFeatures(RandomFeatures):
    """Generalised attention of the Performer paper: φ(x) = M^(-1/2) relu(ωᵀx), another kernel than softmax."""

    log_features = False

    def __init__(self, *sizes: Any, **draw: Any):
        super().__init__(*sizes, **draw)
        self.reset_parameters()

    def tensors(self, role: Role) -> tuple[Tensor]:
        return (torch.cat([self.projection, -self.projection], dim=1) if self.antithetic else self.projection,)

    def features(self, x: Tensor, role: str, scale: float, weight: Tensor) -> Features:
        products = per_head_product(x, weight, scale)
        return Features(torch.zeros_like(x[..., :1]), torch.relu(products) * self.num_features**-0.5)
