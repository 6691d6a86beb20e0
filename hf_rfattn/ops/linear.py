"""Bidirectional linear attention: φ(x_i)ᵀ S / φ(x_i)ᵀ z with S = Σ φ(y_j) v_jᵀ and z = Σ φ(y_j).

With positive features this is softmax attention twice. Each feature r is a landmark that attends to the keys, with mass
λ_r = log Σ_j φ_r(y_j) and mean value μ_r = Σ_j φ_r(y_j) v_j / exp λ_r. Then the queries attend to the landmarks,

    out_i = Σ_r softmax_r(log φ_r(x_i) + λ_r) μ_r,

without a denominator and without overflow. Signed features have no logarithm and are summed directly. Memory is
O(B·H·(L·D + M·D)), since features are computed for one block of positions at a time, in backward too.
"""

from dataclasses import dataclass
from functools import partial, reduce
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from . import backend, fused
from .autograd import differentiate, gradients_of, keep, kept, recompute
from .softmax import SOME, exp_of_difference, softmax_of_scores
from .tiles import block_size


class Features(NamedTuple):
    """φ of some tokens as factor · exp(log): `log` alone, or a `factor` with one `log` per token."""

    log: Tensor  # [B, H, L, M], or [B, H, L, 1] with a factor
    factor: Tensor | None = None  # [B, H, L, M]

    def dense(self) -> Tensor:
        """φ itself, `[B, H, L, M]`, which may overflow."""
        return self.log.exp() if self.factor is None else self.log.exp() * self.factor

    def divided(self, offset: Tensor) -> Tensor:
        """φ / exp(offset), a new tensor."""
        scaled = exp_of_difference(self.log, offset)
        return scaled if self.factor is None else scaled * self.factor


class FeatureFunction(NamedTuple):
    """φ for operators: a pure function of tokens and of `tensors`, the parameters and buffers of a feature map.

    φ of a query may lack a positive factor, which cancels in attention. `floor`, for signed features: the smallest
    magnitude of the denominator per unit of key weight.
    """

    map: Any  # FeatureMap
    role: str
    scale: float
    tensors: tuple[Tensor | None, ...]
    floor: Tensor | None  # [Hkv or 1, 1, 1]
    positive: bool  # φ is given as logarithms
    size: int  # number of features in operators

    def __call__(self, x: Tensor) -> Features:
        """φ of tokens, for operators. With a floor, one more feature accumulates the weight of the keys."""
        found = self.map.features(x, self.role, self.scale, *self.tensors)
        if self.floor is None:
            return found
        return found._replace(factor=F.pad(found.factor, (0, 1), value=float(self.role == "key")))

    def exactly(self, x: Tensor) -> Features:
        """φ of tokens as it is defined."""
        found = self.map.features(x, self.role, self.scale, *self.tensors)
        if self.role == "key":
            return found
        return found._replace(log=found.log + self.map.query_offset(x, self.scale, *self.tensors))

    def landmarks(self, x: Tensor) -> list[fused.Landmarks]:
        """φ of tokens as log-linear features, for fused kernels."""
        return self.map.landmarks(x, self.role, self.scale, *self.tensors)


@dataclass
class State:
    """Base class of all states: dataclasses of tensors (or None), other states, and lists of states.

    `empty`: values of fields before the first token, if they are not zero.
    """

    empty: ClassVar[dict[str, float]] = {}

    def tensors(self) -> list[Tensor]:
        """All tensors, in a fixed order."""
        found: list[Tensor] = []
        for value in vars(self).values():
            for part in value if isinstance(value, list) else [value]:
                found += part.tensors() if isinstance(part, State) else [] if part is None else [part]
        return found

    def reset(self) -> None:
        """Reset to the state before the first token, in place."""
        for name, value in vars(self).items():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, State):
                    part.reset()
                elif part is not None:
                    part.fill_(self.empty.get(name, 0.0))

    def map(self, function: Any) -> "State":
        """Return a state with `function` applied to each tensor."""

        def mapped(value: Any) -> Any:
            if isinstance(value, list):
                return [mapped(item) for item in value]
            return value.map(function) if isinstance(value, State) else None if value is None else function(value)

        return type(self)(**{name: mapped(value) for name, value in vars(self).items()})

    def index_select(self, rows: Tensor) -> "State":
        """Return the state of some sequences of the batch, in any order, possibly repeated."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def to(self, device: torch.device | str) -> "State":
        """Return the state on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy_(self, other: "State") -> None:
        """Copy the values of another state in place; tensors of another shape are replaced."""
        for name, value in vars(self).items():
            theirs = getattr(other, name)
            if isinstance(value, Tensor) and value.shape != theirs.shape:
                setattr(self, name, theirs.detach())
                continue
            for old, new in zip(value, theirs, strict=True) if isinstance(value, list) else [(value, theirs)]:
                if old is not new:
                    with torch.no_grad():
                        old.copy_(new)


@dataclass
class Sums(State):
    """S = exp(log_scale)ᵀ · outer and z = exp(log_scale)ᵀ · total, the sums over keys that queries read."""

    log_scale: Tensor  # [..., 1, M], or [..., 1, 1] for features with a factor
    outer: Tensor  # [..., M, Dv]
    total: Tensor  # [..., M, 1]
    empty: ClassVar[dict[str, float]] = {"log_scale": -torch.inf}

    @staticmethod
    def of_none(phi: FeatureFunction, shape: tuple[int, int, int], dtype: Any, device: Any) -> "Sums":
        """Sums over no keys. `shape`: (B, Hkv, Dv)."""
        B, H, D = shape
        scale = torch.full((B, H, 1, phi.size if phi.positive else 1), -torch.inf, dtype=dtype, device=device)
        return Sums(scale, scale.new_zeros(B, H, phi.size, D), scale.new_zeros(B, H, phi.size, 1))

    @staticmethod
    def of(k: Features, v: Tensor, visible: Tensor | None = None) -> "Sums":
        """Sums over keys `[..., L, M]`, or over the `visible` ones `[..., L, 1]`."""
        log = k.log if visible is None else k.log.masked_fill(~visible, -torch.inf)
        scale = log.detach().amax(-2, keepdim=True)
        phi = exp_of_difference(log, scale)
        phi = phi if k.factor is None else phi * k.factor
        return Sums(scale, phi.mT @ v, phi.sum(-2).unsqueeze(-1))

    def plus(self, other: "Sums") -> "Sums":
        """Sums over the keys of both."""
        scale = torch.maximum(self.log_scale, other.log_scale).detach()
        mine, theirs = (exp_of_difference(s.log_scale.detach(), scale).mT for s in (self, other))
        return Sums(scale, self.outer * mine + other.outer * theirs, self.total * mine + other.total * theirs)

    def landmarks(self) -> tuple[Tensor, Tensor]:
        """λ `[..., 1, M]`, -inf without keys, and μ `[..., M, Dv]`."""
        total = self.total.clamp(min=SOME)
        return self.log_scale + total.log().mT, self.outer / total

    def read(self, q: Features, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention of queries `[B, H, L, M]` → `[B, H, L, Dv]`, zeros without keys; and log φ(x)ᵀz `[B, H, L, 1]`,
        -inf where φ(x)ᵀz is zero (or negative, for signed features).
        """
        heads, kv_heads = q.log.shape[1], self.outer.shape[1]
        log = regroup(q.log, kv_heads)
        if q.factor is None:
            mass, mean = self.landmarks()
            out, lse = softmax_of_scores(log + mass, mean)
            return regroup(out, heads), regroup(lse, heads)
        phi = regroup(q.factor, kv_heads)
        d = phi @ self.total
        out = (phi @ self.outer) / floored(d, None if floor is None else floor.to(d) * self.total[..., -1:, :])
        lse = d.masked_fill(d <= 0, 1.0).log().masked_fill(d <= 0, -torch.inf) + self.log_scale + log
        return regroup(out, heads), regroup(lse, heads)


def floored(denominator: Tensor, least: Tensor | None = None) -> Tensor:
    """Make a denominator safe to divide by: of a magnitude of at least `least`, and infinite where it underflowed."""
    if least is not None:
        sign = torch.where(denominator < 0, -1.0, 1.0).to(denominator.dtype)
        denominator = sign * torch.maximum(denominator.abs(), least)
    # Not the reciprocal, whose gradient (a square) overflows much earlier than the quotient.
    return denominator.masked_fill(denominator.abs() < torch.finfo(denominator.dtype).tiny, torch.inf)


def regroup(x: Tensor, heads: int) -> Tensor:
    """`[B, H, L, E]` → `[B, heads, L · H / heads, E]`: stack the query heads that share a key head, or the inverse."""
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, x.shape[3])


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of features and sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, phi_q: FeatureFunction, phi_k: FeatureFunction, key_mask: Tensor | None = None
) -> Tensor:
    """out_i = Σ_j φ(x_i)ᵀφ(y_j) v_j / Σ_j φ(x_i)ᵀφ(y_j), `[B, H, Lq, Dv]`.

    Queries `[B, H, Lq, D]`, keys `[B, Hkv, Lk, D]`, values `[B, Hkv, Lk, Dv]`; `phi_q` and `phi_k` map them to M
    features. `key_mask` `[B, Lk]`: True for keys that are not padding. A query that sees no key gets zeros.
    O((Lq + Lk) · M · D) time, O(L · D + M · D) memory.
    """
    if q.device.type in backend.DEVICES:
        arguments = q, k, v, phi_q, phi_k
        problem = None if phi_q.map.landmarks else "features are not log-linear"
        if backend.fused("linear", linear_attention, arguments, problem):
            return fused.linear_attention(*arguments, key_mask)
    found = None
    if phi_q.positive and torch.is_grad_enabled():
        found = differentiate(_PositiveAttention, q, k, v, phi_q, phi_k, key_mask)
    return read(q, summarise(k, v, phi_k, key_mask), phi_q) if found is None else found


def summarise(k: Tensor, v: Tensor, phi: FeatureFunction, key_mask: Tensor | None = None) -> Sums:
    """Compute the sums over all visible keys."""
    size = block_size(k, phi.size, least=phi.size)  # the sums of a block are then no larger than its values
    sums_of = partial(recompute, _sums_of_block) if torch.is_grad_enabled() else _sums_of_block
    if size >= k.shape[2]:  # always true in traced code, which must not depend on sizes
        return Sums(*sums_of(k, v, phi, key_mask))
    masks: Any = repeat(None) if key_mask is None else key_mask.split(size, dim=1)
    blocks = zip(k.split(size, dim=2), v.split(size, dim=2), masks, strict=False)
    return reduce(Sums.plus, (Sums(*sums_of(y, u, phi, mask)) for y, u, mask in blocks))


def _sums_of_block(y: Tensor, u: Tensor, phi: FeatureFunction, key_mask: Tensor | None) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(y.dtype, torch.float32)
    sums = Sums.of(phi(y.to(dtype)), u.to(dtype), None if key_mask is None else key_mask[:, None, :, None])
    return sums.log_scale, sums.outer, sums.total


def read(q: Tensor, sums: Sums, phi: FeatureFunction) -> Tensor:
    """Compute the outputs of queries from the sums over all keys."""
    size = block_size(q, phi.size)
    tensors = sums.landmarks() if phi.positive else (sums.log_scale, sums.outer, sums.total)
    read_block = partial(recompute, _read_block) if torch.is_grad_enabled() else _read_block
    if size >= q.shape[2]:
        return read_block(q, phi, *tensors)
    if torch.is_grad_enabled():
        return torch.cat([read_block(x, phi, *tensors) for x in q.split(size, dim=2)], dim=2)
    out = q.new_empty(*q.shape[:3], sums.outer.shape[-1])  # filled in blocks that fit into the CPU's caches
    for x, part in zip(q.split(size, dim=2), out.split(size, dim=2), strict=True):
        part.copy_(read_block(x, phi, *tensors))
    return out


def _read_block(x: Tensor, phi: FeatureFunction, *tensors: Tensor) -> Tensor:
    q = phi(x.to(tensors[1].dtype))
    if not phi.positive:
        return Sums(*tensors).read(q, phi.floor)[0].to(x.dtype)
    mass, mean = tensors
    weights = torch.softmax(regroup(q.log, mean.shape[1]) + mass.clamp(min=_NOTHING), -1)
    return regroup(weights @ mean, x.shape[1]).to(x.dtype)


_NOTHING = -8e37  # instead of a mass of -inf, so that a softmax over no keys is not NaN


def _attention(q, k, v, phi_q, phi_k, key_mask) -> Tensor:
    return read(q, summarise(k, v, phi_k, key_mask), phi_q)


class _PositiveAttention(torch.autograd.Function):
    """Gradients of both softmaxes by hand, those of features by autograd, block by block."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *leaves: Any) -> Tensor:
        q, k, v, phi_q, phi_k, key_mask = tree_unflatten(leaves, spec)
        sums = summarise(k, v, phi_k, key_mask)
        out = read(q, sums, phi_q)
        keep(ctx, spec, leaves, out, *sums.landmarks())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        arguments, (out, mass, mean) = kept(ctx)
        if torch.is_grad_enabled():  # for second derivatives
            return None, *gradients_of(_attention, arguments, [gradient])
        q, k, v, phi_q, phi_k, key_mask = arguments
        dtype, heads, kv_heads = mass.dtype, q.shape[1], k.shape[1]
        queries, keys, dv = FeatureGradients(phi_q, q), FeatureGradients(phi_k, k), None
        d_mean, d_mass = torch.zeros_like(mean), torch.zeros_like(mass)
        size = block_size(q, phi_q.size)
        for rows in (slice(start, start + size) for start in range(0, q.shape[2], size)):
            weights = torch.softmax(regroup(queries.logs(rows), kv_heads) + mass.clamp(min=_NOTHING), -1)
            g, o = (regroup(z[:, :, rows].to(dtype), kv_heads) for z in (gradient, out))
            d_logs = (g @ mean.mT).sub_(torch.linalg.vecdot(g, o).unsqueeze(-1)).mul_(weights)
            d_mean += weights.mT @ g
            d_mass += d_logs.sum(-2, keepdim=True)
            queries.pull(regroup(d_logs, heads))
        shift = (d_mean * mean).sum(-1).unsqueeze(-2) - d_mass
        size = block_size(k, phi_k.size, least=phi_k.size)
        for rows in (slice(start, start + size) for start in range(0, k.shape[2], size)):
            log = keys.logs(rows)
            if key_mask is not None:
                log = log.masked_fill(~key_mask[:, None, rows, None], -torch.inf)
            weights = exp_of_difference(log, mass)
            keys.pull((v[:, :, rows].to(dtype) @ d_mean.mT).sub_(shift).mul_(weights))
            dv = filled(dv, rows, weights @ d_mean, v)
        return None, *tree_leaves((queries.d_tokens, keys.d_tokens, dv, queries.d_phi(), keys.d_phi(), None))


def filled(whole: Tensor | None, rows: slice, block: Tensor, like: Tensor) -> Tensor:
    """Write a block into the rows of a tensor shaped like `like`. A block that covers all rows is not copied."""
    if block.shape[2] == like.shape[2]:
        return block.to(like.dtype)
    whole = torch.empty_like(like) if whole is None else whole
    whole[:, :, rows] = block
    return whole


class FeatureGradients:
    """Backpropagates gradients of log-features to tokens `[B, H, L, D]`, block by block, and to the tensors of φ."""

    def __init__(self, phi: FeatureFunction, tokens: Tensor):
        learned = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in phi.tensors]
        self.phi, self.tokens = phi._replace(tensors=tuple(learned)), tokens
        self.d_tokens: Tensor | None = None
        self.learned = {i: x for i, x in enumerate(learned) if x is not None and x.requires_grad}
        self.d_learned: list[Tensor | None] = [None] * len(learned)

    def logs(self, rows: slice) -> Tensor:
        """log φ of a block of tokens."""
        self.rows, self.x, self.log = rows, self.tokens[:, :, rows].detach(), None
        if not self.learned and self.phi.map.pull:
            return self.phi(self.x.to(compute_dtype(self.x))).log
        with torch.enable_grad(), torch.autocast(self.x.device.type, enabled=False):
            self.log = self.phi(self.x.requires_grad_().to(compute_dtype(self.x))).log
        return self.log.detach()

    def pull(self, gradient: Tensor) -> None:
        """Backpropagate the gradient of the log-features that `logs` returned last."""
        phi, x, dx = self.phi, self.x, None
        if self.log is None:
            dx = phi.map.pull(x.to(gradient.dtype), phi.role, phi.scale, gradient, *phi.tensors)
        elif self.log.requires_grad:
            with torch.autocast(gradient.device.type, enabled=False):
                inputs = [x, *self.learned.values()]
                dx, *others = torch.autograd.grad(self.log, inputs, gradient, allow_unused=True)
            for i, new in zip(self.learned, others, strict=True):
                total = self.d_learned[i]
                self.d_learned[i] = new if total is None else total + new
        dx = torch.zeros_like(x) if dx is None else dx  # φ may not depend on tokens
        self.d_tokens = filled(self.d_tokens, self.rows, dx, self.tokens)

    def d_phi(self) -> FeatureFunction:
        """Gradients of φ: in the positions of its tensors, with None everywhere else."""
        return FeatureFunction(None, None, None, tuple(self.d_learned), None, None, None)  # type: ignore[arg-type]
