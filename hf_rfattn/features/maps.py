"""Feature maps φ with φ(x)ᵀφ(y) standing for the attention kernel, computed in log space (`ops.Features`).

A map is given queries or keys and what to multiply them by, the square root of the scale of the scores. Random
projections are one a key head, so that grouped query heads share the projection of the keys they meet.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import Features, product
from .kernels import KERNELS
from .projections import Projection, draw_projection, seeded_generator

Role = Literal["query", "key"]

TEMPERATURE = 1.0  # where the learned temperature of unit queries and keys starts
SIGNED_FLOOR = 0.01  # a mean kernel value below this is noise for any affordable number of signed features


def per_head_product(
    x: Tensor, weight: Tensor, scale: float = 1.0, norms: float = 0.0, constant: float = 0.0
) -> Tensor:
    """scale · Wx, and norms · |x|² + constant unless norms = 0: `[B, H, L, D]`, `[heads, M, D]` → `[B, H, L, M]`, new.

    Query heads that share a key head share its weight.
    """
    weight = weight.to(x.dtype)
    if not torch.compiler.is_compiling():
        return _PerHeadProduct.apply(x, weight, scale, norms, constant)
    found = (_by_weights(x, weight) @ (scale * weight).transpose(-1, -2)).reshape(*x.shape[:3], weight.shape[1])
    return found + (norms * squared_norm(x) + constant) if norms else found


def log_features(x: Tensor, weight: Tensor, scale: float, norms: float, constant: float, antithetic: bool) -> Tensor:
    """As `per_head_product`; `antithetic` ones have every row of the weight with both signs."""
    if not antithetic:
        return per_head_product(x, weight, scale, norms, constant)
    log = per_head_product(x, weight, scale)
    shift = norms * squared_norm(x) + constant if norms else 0.0
    return torch.cat([shift + log, shift - log], dim=-1)


def squared_norm(x: Tensor) -> Tensor:
    """|x|², `[B, H, L, 1]`."""
    return x.square().sum(-1, keepdim=True)


def _by_weights(x: Tensor, weight: Tensor) -> Tensor:
    """`[B, H, L, …]` as `[B, heads, (H / heads) · L, …]`."""
    B, H, L, D = x.shape
    return x.reshape(B, len(weight), H // len(weight) * L, D)


class _PerHeadProduct(torch.autograd.Function):
    """Each way one product and, for norms, one more pass; by itself autograd would take several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float, norms: float, constant: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale, ctx.norms = scale, norms
        factor = (scale * weight).transpose(-1, -2).expand(x.shape[0], -1, -1, -1)
        found = product(_by_weights(x, weight), factor).view(*x.shape[:3], weight.shape[1])
        if norms:
            found.add_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(norms).add_(constant))
        return found.data  # not a view to autograd: a block's memory is written over, and backward does not need it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = _by_weights(gradient, weight)
        dx = d_weight = None
        if ctx.needs_input_grad[0]:
            dx = (g @ (ctx.scale * weight)).view_as(x)
            if ctx.norms:
                dx.addcmul_(gradient.sum(-1, keepdim=True), x, value=2 * ctx.norms)
        if ctx.needs_input_grad[1]:
            d_weight = (ctx.scale * (g.transpose(-1, -2) @ _by_weights(x, weight))).sum(0)
        return dx, d_weight, None, None, None


class FeatureMap(nn.Module):
    """Base of all maps: `forward(x, role, scale)` → Features of scale · x.

    Each token is mapped by itself. `Features.log` is a new tensor: the operators write over it.
    """

    num_features: int
    positive: bool = True
    scale_per_feature: bool = True  # whether Features.log has a column for each feature, or one for all

    def queries_of_a_quotient(self, x: Tensor, scale: float = 1.0) -> Features:
        """φ of queries up to a positive factor of each token, which a quotient of sums over keys does not see."""
        return self(x, "query", scale)

    def floor(self) -> Tensor | float | None:
        """For signed maps, the least magnitude of the denominator a visible key (one, or `[Hkv]`); None for positive
        maps.
        """
        return None

    def multiply_adds(self) -> int:
        """Multiplications a token and head spends on its features."""
        return 0


class ConstantFeatures(FeatureMap):
    """φ(x) = 1: every visible key weighs the same."""

    num_features = 1

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        return Features(torch.zeros_like(x[..., :1]))


class EluFeatures(FeatureMap):
    """φ(x) = elu(±x) + 1, that is exp(x) below zero and 1 + x above."""

    def __init__(self, head_dim: int, sign: int = 1):
        super().__init__()
        self.num_features = head_dim
        self.sign = sign

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        x = (self.sign * scale) * x
        return Features(torch.where(x > 0, torch.log1p(x.clamp(min=0)), x))


class TanhFeatures(FeatureMap):
    """φ(x) = tanh(x): signed."""

    positive = False
    scale_per_feature = False

    def __init__(self, head_dim: int):
        super().__init__()
        self.num_features = head_dim

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        return Features(torch.zeros_like(x[..., :1]), torch.tanh(scale * x))

    def floor(self) -> float:
        return SIGNED_FLOOR


class RandomFeatures(FeatureMap):
    """A map with random buffers, drawn from (seed, layer, …, number of the draw); subclasses end `__init__` with
    `draw()`.
    """

    projection: Tensor  # [Hkv, rows, D]
    draws: Tensor  # how many times it was redrawn
    steps: Tensor  # training steps since

    def __init__(
        self,
        num_kv_heads: int,
        rows: int,
        head_dim: int,
        seed: tuple[int, ...],
        kind: Projection,
        hadamard_blocks: int,
        redraw_interval: int | None,
    ):
        super().__init__()
        self.version = 0  # changes with the map: a state of generation holds sums of the features of one version
        self.seed = seed
        self.redraw_interval = redraw_interval
        self.kind: Projection = kind
        self.hadamard_blocks = hadamard_blocks
        self.register_buffer("projection", torch.empty(num_kv_heads, rows, head_dim))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """New values of the random buffers."""
        heads, rows, dim = self.projection.shape
        return {"projection": draw_projection(self.kind, heads, rows, dim, generator, self.hadamard_blocks)}

    @torch.no_grad()
    def draw(self) -> None:
        """Fill the random buffers with draw number `draws`."""
        if self.projection.is_meta:
            return  # nothing to fill: a checkpoint will
        number = int(self.draws)
        for name, value in self.sample(seeded_generator(*self.seed, number)).items():
            getattr(self, name).copy_(value)

    def redraw(self) -> None:
        """Go on to the next draw."""
        self.version += 1
        self.draws += 1
        self.steps.zero_()
        self.draw()

    def step(self) -> None:
        """Count a training step, redrawing first when `redraw_interval` of them have passed."""
        if int(self.steps) >= (self.redraw_interval or math.inf):
            self.redraw()
        self.steps += 1

    def multiply_adds(self) -> int:
        return self.projection.shape[1] * self.projection.shape[2]


class PositiveFeatures(RandomFeatures):
    """FAVOR+: φ(x)_r = M^(-1/2) exp(ω_rᵀx - |x|²/2), E φ(x)ᵀφ(y) = exp(xᵀy).

    With `optimal` the map is that of FAVOR++, f = (1-4A)^(d/4) exp(A|ω|² + sqrt(1-4A) ωᵀx - |x|²/2), where A comes from
    ρ, the mean of |x+y|²/d, kept per key head in the buffer `rho`; ρ = 0 gives FAVOR+ again. Unbiased for every ρ.
    """

    rho: Tensor

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
        optimal: bool = False,
        redraw_interval: int | None = None,
    ):
        rows = num_features // 2 if antithetic else num_features
        super().__init__(num_kv_heads, rows, head_dim, seed, projection, hadamard_blocks, redraw_interval)
        self.num_features = num_features
        self.antithetic = antithetic
        self.optimal = optimal
        if optimal:
            self.register_buffer("rho", torch.ones(num_kv_heads))
        self.draw()

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        return self._features(x, scale, -(scale**2) / 2, -math.log(self.num_features) / 2)

    def queries_of_a_quotient(self, x: Tensor, scale: float = 1.0) -> Features:
        return self._features(x, scale, 0.0, 0.0)

    def _features(self, x: Tensor, scale: float, norms: float, constant: float) -> Features:
        """With logarithms scale · ω_rᵀx + norms · |x|² + constant."""
        if not self.optimal:
            return Features(log_features(x, self.projection, scale, norms, constant, self.antithetic))
        log = per_head_product(x, self.projection, scale)
        rho = self.rho.to(x.dtype).repeat_interleave(x.shape[1] // len(self.rho))[:, None, None]  # [H, 1, 1]
        a = (1 - 2 * rho - torch.sqrt((2 * rho + 1).square() + 8 * rho)) / 16
        squares = self.projection.to(x.dtype).square().sum(-1)  # [Hkv, rows]
        squares = squares.repeat_interleave(x.shape[1] // len(squares), 0).unsqueeze(1)  # [H, 1, rows]
        log, shift = log * torch.sqrt(1 - 4 * a), a * squares + (x.shape[-1] / 4 * torch.log1p(-4 * a) + constant)
        shift = shift + norms * squared_norm(x) if norms else shift
        return Features(torch.cat([shift + log, shift - log], dim=-1) if self.antithetic else shift + log)

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


class ReluFeatures(PositiveFeatures):
    """Generalised attention of the Performer: φ(x) = M^(-1/2) relu(ωᵀx), a kernel of its own."""

    scale_per_feature = False

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        products = per_head_product(x, self.projection, scale)
        if self.antithetic:
            products = torch.cat([products, -products], dim=-1)
        return Features(torch.zeros_like(x[..., :1]), torch.relu(products) * self.num_features**-0.5)

    def queries_of_a_quotient(self, x: Tensor, scale: float = 1.0) -> Features:
        return self(x, "query", scale)


class FourierFeatures(RandomFeatures):
    """Random Fourier features of a shift-invariant kernel: signed.

    `form="sincos"`: φ(x) = R^(-1/2) [sin ωᵀx, cos ωᵀx] with R = num_features / 2 frequencies; `form="cos"`: φ(x) =
    (2/M)^(1/2) cos(ωᵀx + b), b uniform on [0, 2π]. With `normalize_qk`, x becomes τ^(1/2) x/|x|, τ learned per key
    head; without it the Gaussian kernel gets the factors exp(|x|²/2) exp(|y|²/2) that make it exp(xᵀy).
    """

    positive = False
    scale_per_feature = False
    phase: Tensor

    def __init__(
        self,
        num_kv_heads: int,
        num_features: int,
        head_dim: int,
        seed: tuple[int, ...],
        *,
        kernel: str = "gaussian",
        projection: Projection = "orthogonal",
        hadamard_blocks: int = 3,
        form: Literal["sincos", "cos"] = "sincos",
        normalize_qk: bool = True,
        redraw_interval: int | None = None,
    ):
        rows = num_features if form == "cos" else num_features // 2
        super().__init__(num_kv_heads, rows, head_dim, seed, projection, hadamard_blocks, redraw_interval)
        self.num_features = num_features
        self.kernel = kernel
        self.form = form
        self.normalize_qk = normalize_qk
        if form == "cos":
            self.register_buffer("phase", torch.empty(num_kv_heads, rows))
        if normalize_qk:
            self.log_temperature = nn.Parameter(torch.full((num_kv_heads,), math.log(TEMPERATURE)))
        self.draw()

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        draw = KERNELS[self.kernel].frequencies
        if draw is None:
            buffers = super().sample(generator)
        else:
            buffers = {"projection": draw(tuple(self.projection.shape), generator)}
        if self.form == "cos":
            shape = tuple(self.phase.shape)
            buffers["phase"] = 2 * math.pi * torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return buffers

    def forward(self, x: Tensor, role: Role, scale: float = 1.0) -> Features:
        groups = x.shape[1] // self.projection.shape[0]
        if self.normalize_qk:
            temperature = torch.exp(self.log_temperature.to(x.dtype) / 2).repeat_interleave(groups)
            x, scale = F.normalize(x, dim=-1) * temperature[:, None, None], 1.0
        angle = per_head_product(x, self.projection, scale)
        if self.form == "cos":
            factor = torch.cos(angle + self.phase.to(x.dtype).repeat_interleave(groups, 0).unsqueeze(1))
        else:
            factor = torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)
        factor = factor * (2 / self.num_features) ** 0.5
        if self.kernel == "gaussian" and not self.normalize_qk:
            return Features(squared_norm(x) * (scale**2 / 2), factor)
        return Features(torch.zeros_like(x[..., :1]), factor)

    def floor(self) -> Tensor | float:
        """With unit queries and keys, the least the exact kernel can be (at distance 2 τ^(1/2)), or what noise cannot
        resolve.
        """
        if not self.normalize_qk:
            return SIGNED_FLOOR
        temperature = torch.exp(
            self.log_temperature.detach().to(torch.promote_types(self.log_temperature.dtype, torch.float32))
        )
        return KERNELS[self.kernel].least(4 * temperature, self.projection.shape[-1]).clamp(min=SIGNED_FLOOR)
