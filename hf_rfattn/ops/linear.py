"""Linear attention in which every query sees every visible key: φ(x_i)ᵀ S / φ(x_i)ᵀ z, S = Σ φ(y_j) v_jᵀ, z = Σ φ(y_j).

With positive features that is softmax attention twice. Each feature r is a landmark that reads the keys: their mass
λ_r = log Σ_j φ_r(y_j) and the mean of their values μ_r = Σ_j φ_r(y_j) v_j / exp λ_r. Then queries read the landmarks,

    out_i = Σ_r softmax_r(log φ_r(x_i) + λ_r) μ_r,

so that no denominator is left and nothing can overflow. Signed features have no logarithm and are summed as they are.
Memory is O(B·H·(L·D + M·D)): features exist for a block of positions at a time, in backward too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from .autograd import differentiate, gradients_of, keep, kept, recompute, traced
from .softmax import above_zero, exp_of_difference, finite, log_or_inf
from .state import State

BLOCK = {"cpu": 2**19}  # numbers in the largest tensor of a block: a few of them stay in a CPU's caches
OTHER_BLOCK = 2**26  # elsewhere: enough work for each kernel


class Features(NamedTuple):
    """φ of some tokens, as factor · exp(log): `log` alone, or a `factor` with one `log` a token."""

    log: Tensor  # [B, H, L, M], or [B, H, L, 1] beside a factor
    factor: Tensor | None = None  # [B, H, L, M]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """The same function of both tensors: to cut, pad or reshape positions."""
        return Features(function(self.log), None if self.factor is None else function(self.factor))

    def rows(self, rows: slice) -> "Features":
        """Of some positions."""
        return self.map(lambda x: x[:, :, rows])

    def dense(self) -> Tensor:
        """φ itself, `[B, H, L, M]`: exact only where it does not overflow."""
        return self.log.exp() if self.factor is None else self.log.exp() * self.factor

    def divided(self, offset: Tensor) -> Tensor:
        """φ / exp(offset), a new tensor."""
        scaled = exp_of_difference(self.log, offset)
        return scaled if self.factor is None else scaled * self.factor

    def only(self, visible: Tensor | None) -> "Features":
        """φ = 0 in all rows but the `visible` ones `[…, L, 1]`: these neither count nor enter an offset."""
        if visible is None:
            return self
        log = self.log.masked_fill(~visible, -torch.inf)
        return Features(log, None if self.factor is None else self.factor * visible)


class FeatureFunction(NamedTuple):
    """φ as the operators take it: a pure function of tokens and of `tensors`, which is what a feature map has learned.

    Queries may be mapped up to a positive factor of each token, which quotients
    do not see. `floor`, for signed features: the least magnitude of a denominator, a unit of weight of the keys.
    """

    map: Any  # FeatureMap
    role: str
    scale: float
    tensors: tuple[Tensor | None, ...]
    floor: Tensor | None = None  # [Hkv or 1, 1, 1]

    def __call__(self, x: Tensor) -> Features:
        """φ of tokens, for operators. Where there is a floor, one more feature sums up the weight of the keys."""
        found = self.map.features(x, self.role, self.scale, *self.tensors)
        if self.floor is None:
            return found
        return found._replace(factor=F.pad(found.factor, (0, 1), value=float(self.role == "key")))

    def exactly(self, x: Tensor) -> Features:
        """φ of tokens as it is defined."""
        found = self.map.features(x, self.role, self.scale, *self.tensors)
        return found if self.role == "key" else found._replace(log=found.log + self.offset(x))

    def offset(self, x: Tensor) -> Tensor | float:
        """The logarithm of the factor that operators leave out of φ of queries."""
        return self.map.query_offset(x, self.scale, *self.tensors)

    @property
    def positive(self) -> bool:
        """Whether φ comes as logarithms."""
        return self.map.log_features

    @property
    def size(self) -> int:
        """Length of φ in operators."""
        return self.map.num_features + (self.floor is not None)


@dataclass
class Sums(State):
    """S = exp(log_scale) · outer and z = exp(log_scale) · total over any number of keys: all a query needs to know."""

    log_scale: Tensor  # [..., 1, M], or [..., 1, 1] for features with a factor
    outer: Tensor  # [..., M, D]
    total: Tensor  # [..., M, 1]
    empty: ClassVar[dict[str, float]] = {"log_scale": -torch.inf}

    @staticmethod
    def of_none(phi: FeatureFunction, shape: tuple[int, int, int], dtype: Any, device: Any) -> "Sums":
        """Of no keys, for a shape of B, Hkv, Dv."""
        B, H, D = shape
        like = torch.empty((), dtype=dtype, device=device)
        scale = like.new_full((B, H, 1, phi.size if phi.positive else 1), -torch.inf)
        return Sums(scale, like.new_zeros(B, H, phi.size, D), like.new_zeros(B, H, phi.size, 1))

    @staticmethod
    def before(phi: FeatureFunction, v: Tensor) -> "Sums":
        """Of no keys, for values `[B, Hkv, L, Dv]`."""
        return Sums.of_none(phi, (v.shape[0], v.shape[1], v.shape[3]), compute_dtype(v), v.device)

    @staticmethod
    def of(k: Features, v: Tensor) -> "Sums":
        """Of keys `[..., L, M]`."""
        scale = k.log.detach().amax(-2, keepdim=True)
        phi = k.divided(scale)
        return Sums(scale, phi.mT @ v, phi.sum(-2).unsqueeze(-1))

    def plus(self, other: "Sums") -> "Sums":
        """Of the keys of both."""
        scale = torch.maximum(self.log_scale, other.log_scale).detach()
        mine, theirs = (exp_of_difference(s.log_scale.detach(), scale).mT for s in (self, other))
        return Sums(scale, self.outer * mine + other.outer * theirs, self.total * mine + other.total * theirs)

    def landmarks(self) -> tuple[Tensor, Tensor]:
        """λ `[..., 1, M]` and μ `[..., M, D]`; λ is very small, and finite, for a feature without mass."""
        return finite(self.log_scale + log_or_inf(self.total).mT), self.outer / above_zero(self.total)

    def read(self, q: Features, floor: Tensor | None = None) -> Tensor:
        """Attention of queries `[B, H, L, M]` → `[B, H, L, D]`; zeros where nothing has mass."""
        if q.factor is None:
            return read_landmarks(q.log, *self.landmarks())
        phi = group(q.factor, self.outer.shape[1])
        least = None if floor is None else floor.to(self.total) * self.total[..., -1:, :]
        return ungroup((phi @ self.outer) / floored(phi @ self.total, least), q.factor.shape[1])

    def log_sum(self, q: Features) -> Tensor:
        """log φ(x)ᵀz of queries, `[B, H, L, 1]`, -inf where it is zero (or, of signed features, negative)."""
        heads, kv_heads = q.log.shape[1], self.outer.shape[1]
        if q.factor is not None:
            log = log_or_inf((group(q.factor, kv_heads) @ self.total).clamp(min=0)) + self.log_scale
            return ungroup(log, heads) + q.log
        log = torch.logsumexp(group(q.log, kv_heads) + self.landmarks()[0], -1, keepdim=True)
        return ungroup(log.masked_fill(log < torch.finfo(log.dtype).min / 8, -torch.inf), heads)


def read_landmarks(log: Tensor, mass: Tensor, mean: Tensor) -> Tensor:
    """Attention of queries `[B, H, L, M]` to landmarks of a mass `[B, Hkv, 1, M]` and a mean value `[B, Hkv, M, D]`."""
    return ungroup(torch.softmax(group(log, mean.shape[1]) + mass, -1) @ mean, log.shape[1])


def floored(denominator: Tensor, least: Tensor | None = None) -> Tensor:
    """A denominator that can be divided by: of a magnitude of at least `least`; infinite where it is zero, or has lost
    its digits.
    """
    if least is not None:
        sign = torch.where(denominator < 0, -1.0, 1.0).to(denominator.dtype)
        denominator = sign * torch.maximum(denominator.abs(), least)
    # not by the reciprocal: its gradient, a square, overflows long before the quotient does
    return denominator.masked_fill(denominator.abs() < torch.finfo(denominator.dtype).tiny, torch.inf)


def group(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, H, L, E]` → `[B, Hkv, G·L, E]`: the query heads that share a key head, below each other."""
    B, H, L, E = x.shape
    return x if kv_heads == H else x.reshape(B, kv_heads, H // kv_heads * L, E)


def ungroup(x: Tensor, heads: int) -> Tensor:
    """The inverse."""
    B, K, L, E = x.shape
    return x if heads == K else x.reshape(B, heads, L * K // heads, E)


def blocks(length: int, numbers: int, least: int, device: torch.device, multiple: int = 1) -> list[slice]:
    """Blocks of positions, about equal: `numbers` is what a position brings to the largest tensor.

    Compilers get one block, since the number of blocks would tie a program to a length.
    """
    if traced():
        return [slice(0, length)]
    longest = max(BLOCK.get(device.type, OTHER_BLOCK) // numbers, least)
    size = -(-length // -(-length // longest))
    size = -(-size // multiple) * multiple
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of features and sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, phi_q: FeatureFunction, phi_k: FeatureFunction, key_mask: Tensor | None = None
) -> Tensor:
    """Attention `[B, H, Lq, Dv]` of queries `[B, H, Lq, D]` over keys `[B, Hkv, Lk, D]` and values `[B, Hkv, Lk, Dv]`.

    `key_mask` `[B, Lk]`: True for keys that exist. O((Lq + Lk) · M · D) time.
    """
    arguments = q, k, v, phi_q, phi_k, key_mask
    found = differentiate(_PositiveAttention, *arguments) if phi_q.positive else None
    return _attention(*arguments) if found is None else found


def _attention(q, k, v, phi_q, phi_k, key_mask) -> Tensor:
    return _read(q, summarise(k, v, phi_k, key_mask), phi_q)


def summarise(k: Tensor, v: Tensor, phi: FeatureFunction, key_mask: Tensor | None = None) -> Sums:
    """The sums over all visible keys."""
    rows = key_blocks(k, phi)
    masks = [None if key_mask is None else key_mask[:, None, r, None] for r in rows]
    found = None
    for mask, y, u in zip(masks, split(k, rows), split(v, rows), strict=True):
        new = Sums(*recompute(_summarise_block, y, u, phi, mask))
        found = new if found is None else found.plus(new)
    return Sums.before(phi, v) if found is None else found


def _summarise_block(y: Tensor, u: Tensor, phi: FeatureFunction, mask: Tensor | None) -> tuple[Tensor, ...]:
    dtype = compute_dtype(y)
    return tuple(Sums.of(phi(y.to(dtype)).only(mask), u.to(dtype)).tensors())


def _read(q: Tensor, sums: Sums, phi: FeatureFunction) -> Tensor:
    rows, tensors = query_blocks(q, phi), sums.landmarks() if phi.positive else tuple(sums.tensors())
    if torch.is_grad_enabled() or traced():
        return torch.cat([recompute(_read_block, x, phi, *tensors) for x in split(q, rows)], dim=2)
    out = q.new_empty(*q.shape[:3], sums.outer.shape[-1])
    for r in rows:
        out[:, :, r] = _read_block(q[:, :, r], phi, *tensors)
    return out


def _read_block(x: Tensor, phi: FeatureFunction, *tensors: Tensor) -> Tensor:
    q = phi(x.to(tensors[1].dtype))
    out = read_landmarks(q.log, *tensors) if phi.positive else Sums(*tensors).read(q, phi.floor)
    return out.to(x.dtype)


def key_blocks(k: Tensor, phi: FeatureFunction) -> list[slice]:
    """Of no fewer keys than there are features, so that sums are no larger than values."""
    B, H, L, D = k.shape
    return blocks(L, B * H * max(D, phi.size), phi.size, k.device)


def query_blocks(q: Tensor, phi: FeatureFunction) -> list[slice]:
    B, H, L, D = q.shape
    return blocks(L, B * H * max(D, phi.size), 1, q.device)


def split(x: Tensor, rows: list[slice]) -> tuple[Tensor, ...]:
    """Blocks of dimension 2, which are all of one length but the last: autograd joins their gradients once."""
    return (x,) if len(rows) == 1 else x.split(rows[0].stop, dim=2)


class _PositiveAttention(torch.autograd.Function):
    """The gradients of both softmaxes by hand, those of the features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Tensor:
        q, k, v, phi_q, phi_k, key_mask = tree_unflatten(leaves, spec)
        sums = summarise(k, v, phi_k, key_mask)
        out = _read(q, sums, phi_q)
        keep(ctx, spec, leaves, out, *sums.landmarks())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        arguments, (out, mass, mean) = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, [gradient])
        q, k, v, phi_q, phi_k, key_mask = arguments
        dtype, heads = mass.dtype, q.shape[1]
        queries, keys = FeatureGradients(phi_q), FeatureGradients(phi_k)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        d_mean, d_mass = torch.zeros_like(mean), torch.zeros_like(mass)
        for rows in query_blocks(q, phi_q):
            logs = group(queries.logs(q[:, :, rows]), mean.shape[1])
            weights = torch.softmax(logs + mass, -1)
            g, o = (group(z[:, :, rows].to(dtype), mean.shape[1]) for z in (gradient, out))
            d_logs = (g @ mean.mT).sub_((g * o).sum(-1, keepdim=True)).mul_(weights)
            d_mean += weights.mT @ g
            d_mass += d_logs.sum(-2, keepdim=True)
            dq[:, :, rows] = queries.pull(ungroup(d_logs, heads))
        shift = (d_mean * mean).sum(-1).unsqueeze(-2) - d_mass
        for rows in key_blocks(k, phi_k):
            logs = keys.logs(k[:, :, rows], None if key_mask is None else key_mask[:, None, rows, None])
            weights = exp_of_difference(logs, mass)
            d_logs = (v[:, :, rows].to(dtype) @ d_mean.mT).sub_(shift).mul_(weights)
            dv[:, :, rows] = weights @ d_mean
            dk[:, :, rows] = keys.pull(d_logs)
        d_tokens = dq if queries.used else None, dk if keys.used else None
        return None, *tree_leaves((*d_tokens, dv, queries.found(), keys.found(), None))


class FeatureGradients:
    """Takes gradients of log-features back to tokens, block by block, and sums those of the tensors of φ."""

    def __init__(self, phi: FeatureFunction):
        self.tensors = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in phi.tensors]
        self.phi = phi._replace(tensors=tuple(self.tensors))
        self.sums: list[Tensor | None] = [None] * len(self.tensors)
        self.used = False  # whether features depend on tokens at all

    def logs(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """log φ of a block of tokens, -inf for those that are not `visible`."""
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            self.x = x.detach().requires_grad_()
            self.log = self.phi(self.x.to(compute_dtype(x))).log
        log = self.log.detach()
        return log if visible is None else log.masked_fill(~visible, -torch.inf)

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient of those tokens, from that of their log-features."""
        if not self.log.requires_grad:
            return torch.zeros_like(self.x)
        self.used = True
        learned = [i for i, t in enumerate(self.tensors) if t is not None and t.requires_grad]
        with torch.autocast(gradient.device.type, enabled=False):
            inputs = [self.x, *(t for t in self.tensors if t is not None and t.requires_grad)]
            dx, *others = torch.autograd.grad(self.log, inputs, gradient, allow_unused=True)
        for i, new in zip(learned, others, strict=True):
            if new is not None:
                total = self.sums[i]
                self.sums[i] = new if total is None else total + new
        return torch.zeros_like(self.x) if dx is None else dx

    def found(self) -> FeatureFunction:
        """The sums in the places of the tensors they belong to, and None in all other places."""
        return FeatureFunction(None, None, None, tuple(self.sums), None)  # type: ignore[arg-type]
