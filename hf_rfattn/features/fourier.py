"""Random Fourier features."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import Features
from .kernels import KERNELS
from .maps import SIGNED_FLOOR, RandomFeatures, Role, per_head_product, per_query_head

TEMPERATURE = 1.0  # initial value of the learned temperature


class FourierFeatures(RandomFeatures):
    """Random Fourier features of a shift-invariant kernel. They are signed.

    `form="sincos"`: φ(x) = R^(-1/2) [sin ωᵀx, cos ωᵀx] with R = num_features / 2 frequencies; `form="cos"`: φ(x) =
    (2/M)^(1/2) cos(ωᵀx + b), b uniform on [0, 2π]. With `normalize_qk`, x is replaced by τ^(1/2) x/|x| with τ learned
    per key head. Without it, the Gaussian kernel is multiplied by exp(|x|²/2) exp(|y|²/2), which gives exp(xᵀy).
    """

    positive = False
    log_features = False
    phase: Tensor

    def __init__(
        self,
        num_kv_heads: int,
        *sizes: Any,
        kernel: str = "gaussian",
        form: Literal["sincos", "cos"] = "sincos",
        normalize_qk: bool = True,
        **draw: Any,
    ):
        super().__init__(num_kv_heads, *sizes, antithetic=form == "sincos", **draw)  # a sine and a cosine of each row
        self.kernel, self.form, self.normalize_qk = kernel, form, normalize_qk
        if form == "cos":
            self.register_buffer("phase", torch.empty(num_kv_heads, self.num_features))
        if normalize_qk:
            self.log_temperature = nn.Parameter(torch.empty(num_kv_heads))
        self.reset_parameters()

    def sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        draw, shape = KERNELS[self.kernel].frequencies, tuple(self.projection.shape)
        buffers = super().sample(generator) if draw is None else {"projection": draw(shape, generator)}
        if self.form == "cos":
            uniform = torch.rand(shape[:2], generator=generator, dtype=torch.float64, device="cpu")
            buffers["phase"] = 2 * math.pi * uniform
        return buffers

    def tensors(self, role: Role) -> tuple[Tensor | None, ...]:
        return self.projection, getattr(self, "phase", None), getattr(self, "log_temperature", None)

    def features(
        self, x: Tensor, role: str, scale: float, weight: Tensor, phase: Tensor | None, log_temperature: Tensor | None
    ) -> Features:
        heads = x.shape[1]
        if log_temperature is not None:
            root = torch.exp(log_temperature.to(x.dtype) / 2)[:, None, None]
            x, scale = F.normalize(x, dim=-1) * per_query_head(root, heads), 1.0
        angle = per_head_product(x, weight, scale)
        if phase is not None:
            factor = torch.cos(angle + per_query_head(phase.to(x.dtype).unsqueeze(1), heads))
        else:
            factor = torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)
        factor = factor * (2 / self.num_features) ** 0.5
        if self.kernel == "gaussian" and not self.normalize_qk:
            return Features(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() * (scale**2 / 2), factor)
        return Features(torch.zeros_like(x[..., :1]), factor)

    def floor(self) -> Tensor:
        """With normalised queries and keys, the smallest value of the exact kernel (at distance 2 τ^(1/2)), but not
        less than `SIGNED_FLOOR`.
        """
        if not self.normalize_qk:
            return torch.full((1, 1, 1), SIGNED_FLOOR, device=self.projection.device)
        log = self.log_temperature.detach()
        temperature = torch.exp(log.to(torch.promote_types(log.dtype, torch.float32)))[:, None, None]
        return KERNELS[self.kernel].least(4 * temperature, self.projection.shape[-1]).clamp(min=SIGNED_FLOOR)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.normalize_qk:
            self.log_temperature.fill_(math.log(TEMPERATURE))
