"""Linear-chain Markov random fields with transitions exp(xᵀy): exact inference, and inference with feature maps.

    p(x_1 … x_T) = exp(Σ_t u_t(x_t) + Σ_{t>1} e_{t-1}(x_{t-1})ᵀe_t(x_t)) / Z

over |X| states per node, each with an embedding e and a score u. The forward algorithm computes log Z in O(T|X|²). With
features, exp(xᵀy) ≈ φ(x)ᵀφ(y), the sums over states factorise:

    Z ≈ lᵀ C_2 … C_{T-1} r,   l = Σ_x exp(u_1) φ,   C_t = Σ_x exp(u_t) φφᵀ,   r = Σ_x exp(u_T) φ

- "serial" propagates the message lᵀC_2…C_t without computing C_t: O(T|X|M);
- "tree" computes all C_t and multiplies neighbours: O(T|X|M² + TM³) operations in log₂ T rounds.

Both work with logarithms and signs, so they do not overflow. Both are differentiable; marginals are gradients of log Z.

Bias of random features: with an independent draw for each transition, Z is unbiased, since the expectations of
independent factors multiply; its logarithm is then too low on average (Jensen's inequality). With one draw for all
transitions, every factor is unbiased but their product is not if T > 2. Signed (trigonometric) features can make Z
negative, unless all nodes share the draw, embeddings and scores; this raises an error unless the sign is requested.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .features import FeatureMap, PositiveFeatures
from .ops import Features

Method = Literal["serial", "tree"]


class SignedLog(NamedTuple):
    """sign · exp(log)."""

    log: Tensor
    sign: Tensor

    @classmethod
    def of(cls, values: Tensor, offset: Tensor) -> "SignedLog":
        """values · exp(offset). Values that underflowed to zero stay finite and pass no gradient."""
        log = values.abs().clamp(min=torch.finfo(values.dtype).tiny).log()
        return cls(log + offset, values.detach().sign())

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Values scaled to a largest magnitude of one, and the log of the divisor."""
        offset = largest(self.log, -1)
        return self.sign * torch.exp(self.log - offset), offset


class ScaledMatrix(NamedTuple):
    """diag(exp(row)) · core · diag(exp(column)), where the offsets of rows and columns keep the core near one. Those of
    rows are in float64, since thousands are added up.
    """

    row: Tensor  # [..., R]
    core: Tensor  # [..., R, M]
    column: Tensor  # [..., M]

    def times(self, other: "ScaledMatrix") -> "ScaledMatrix":
        between = self.column + other.row
        offset = largest(between, -1)
        core = (self.core * torch.exp(between - offset).to(self.core).unsqueeze(-2)) @ other.core
        size = core.detach().abs().amax(-1).clamp(min=torch.finfo(core.dtype).tiny)
        return ScaledMatrix(self.row + offset + size.log(), core / size.unsqueeze(-1), other.column)


class Factors(NamedTuple):
    """Factorised transitions exp(xᵀy) ≈ Σ_r source_r(x) exp(source_log_r + target_log_r) target_r(y).

    Each feature has its own scale, such that its largest value over states is one.
    """

    source: Tensor  # [..., X, M]
    source_log: Tensor  # [..., M], or [..., 1] if all features share one scale
    target: Tensor
    target_log: Tensor

    @classmethod
    def of(cls, source: Features, target: Features) -> "Factors":
        """From features `[..., X, M]`."""
        parts = []
        for features in (source, target):
            offset = largest(features.log, -2)
            values = torch.exp(features.log - offset)
            parts += [values if features.factor is None else features.factor * values, offset.squeeze(-2)]
        return cls(*parts)

    def step(self, message: Tensor) -> SignedLog:
        """Return the message of a node from that of the previous node, `[X]`."""
        sums = SignedLog.of(message @ self.source, self.source_log + self.target_log)
        values, offset = sums.scaled()
        return SignedLog.of(values @ self.target.mT, offset)


def tree_product(matrices: ScaledMatrix) -> ScaledMatrix:
    """Product over the first dimension, multiplying neighbours in log₂ rounds."""
    while (count := len(matrices.core)) > 1:
        even = count // 2 * 2
        left, right = (ScaledMatrix(*(x[start:even:2] for x in matrices)) for start in (0, 1))
        product = left.times(right)
        if even < count:
            product = ScaledMatrix(*(torch.cat([x, y[-1:]]) for x, y in zip(product, matrices, strict=True)))
        matrices = product
    return ScaledMatrix(*(x[0] for x in matrices))


def largest(log: Tensor, dim: int) -> Tensor:
    """The detached maximum, finite even if all values are -inf."""
    return log.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(log.dtype).min)


class LinearChainMRF:
    """A linear-chain Markov random field with transitions exp(e(x)ᵀe(y)).

    `embeddings`: `[X, n]`, shared by all nodes, or `[T, X, n]`. `length`: number of nodes T, by default that of the
    embeddings. `unary`: scores u, `[X]` or `[T, X]`; -inf forbids a state.

    >>> chain = LinearChainMRF(torch.zeros(3, 2), length=4)
    >>> chain.log_partition().exp()  # 3⁴ sequences of weight 1
    tensor(81.0000)
    >>> chain.log_partition(chain.random_features(16)).exp()
    tensor(81.0000)
    >>> chain.marginals()[0]
    tensor([0.3333, 0.3333, 0.3333])
    """

    def __init__(self, embeddings: Tensor, length: int | None = None, unary: Tensor | None = None):
        if embeddings.dim() not in (2, 3) or not embeddings.is_floating_point():
            raise ValueError(
                f"embeddings must be floating-point tensors [states, n] or [T, states, n], not {embeddings.dtype} "
                f"{tuple(embeddings.shape)}."
            )
        own = len(embeddings) if embeddings.dim() == 3 else None  # number of nodes with their own embeddings
        length = own if length is None else length
        if length is None:
            raise ValueError("Embeddings [states, n] are shared by all nodes: give their number, length=T.")
        if length < 1 or own not in (None, length):
            raise ValueError(
                f"length must be a positive integer, and T if embeddings are [T, states, n], not {length!r}."
            )
        self.embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        self.num_nodes, self.num_states = length, embeddings.shape[-2]
        shape = length, self.num_states
        if unary is not None and tuple(unary.shape) not in (shape, shape[1:]):
            raise ValueError(f"unary must be [X] or [T, X] with T, X = {shape}, not {tuple(unary.shape)}.")
        self.unary = (self.embeddings.new_zeros(()) if unary is None else unary.to(self.embeddings)).expand(shape)

    def random_features(
        self, num_features: int, *, independent: bool = False, seed: int = 0, **options: Any
    ) -> PositiveFeatures:
        """Draw positive random features for this chain. `independent`: one draw per transition, which makes Z unbiased.

        `options`: those of `PositiveFeatures` (projection, hadamard_blocks, antithetic, optimal).
        """
        draws = self.num_nodes - 1 if independent and self.num_nodes > 1 else 1
        features = PositiveFeatures(draws, num_features, self.embeddings.shape[-1], (seed,), **options)
        if features.optimal:
            x = self.embeddings.detach().reshape(1, 1, -1, self.embeddings.shape[-1]).expand(1, draws, -1, -1)
            features.calibrate(x, x, None)
        return features.to(self.embeddings.device)

    def log_partition(
        self, features: FeatureMap | None = None, *, method: Method = "serial", return_sign: bool = False
    ) -> Any:
        """Compute log Z, exactly or with `features` by one of two methods (for their cost, see `hf_rfattn.mrf`).

        With `return_sign`, returns the sign of Z and log |Z|. Without it, raises ValueError if Z is not positive.

        >>> chain = LinearChainMRF(torch.randn(5, 3), length=7)
        >>> chain.log_partition(chain.random_features(8), method="tree").shape
        torch.Size([])
        """
        z = self._partition(features, method, self.unary)
        return (z.sign, z.log) if return_sign else _positive(z)

    def marginals(self, features: FeatureMap | None = None, *, method: Method = "serial") -> Tensor:
        """Compute p(x_t), `[T, X]`, as the gradient of log Z. Signed features may give values outside [0, 1]."""
        with torch.enable_grad():
            unary = self.unary.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(_positive(self._partition(features, method, unary)), unary)
        return found

    def _partition(self, features: FeatureMap | None, method: Method, unary: Tensor) -> SignedLog:
        if method not in get_args(Method):
            raise ValueError(f"Unknown method {method!r}; choose one of {', '.join(get_args(Method))}.")
        if method == "serial" or self.num_nodes == 1:
            return self._serial(features, unary)
        if features is None:
            raise ValueError(f"method={method!r} needs features; give them, or use method='serial'.")
        return self._tree(self._factors(features), unary)

    def _serial(self, features: FeatureMap | None, unary: Tensor) -> SignedLog:
        """The forward algorithm, with exact transitions or with features. Offsets of messages are summed in float64."""
        transitions: list[Any]
        if features is None:
            e = self.embeddings
            transitions = list((e @ e.mT).unsqueeze(0) if e.dim() == 2 else e[:-1] @ e[1:].mT)
        else:
            transitions = [Factors(*one) for one in zip(*(x.unbind() for x in self._factors(features)), strict=True)]
        if len(transitions) == 1:
            transitions *= self.num_nodes - 1
        message = SignedLog(unary[0], torch.ones_like(unary[0]))
        total = torch.zeros((), dtype=torch.float64, device=unary.device)
        for transition, score in zip(transitions, unary[1:], strict=False):
            values, offset = message.scaled()
            if features is None:
                message = SignedLog(torch.logsumexp((message.log - offset)[:, None] + transition, 0), message.sign)
            else:
                message = transition.step(values)
            message, total = message._replace(log=message.log + score), total + offset.squeeze(0).double()
        values, offset = message.scaled()
        z = SignedLog.of(values.sum(), offset.squeeze(0).double() + total)
        return z._replace(log=z.log.to(unary.dtype))

    def _tree(self, factors: Factors, unary: Tensor) -> SignedLog:
        """lᵀ C_2 … C_{T-1} r as a product of scaled matrices."""
        scale = largest(unary, -1)  # [T, 1]
        weight = torch.exp(unary - scale)
        transitions = self.num_nodes - 1
        source, source_log, target, target_log = (x.expand(transitions, *x.shape[1:]) for x in factors)
        product = ScaledMatrix(scale[0].double(), weight[:1] @ source[0], source_log[0])
        if transitions > 1:
            core = (target[:-1].mT * weight[1:-1].unsqueeze(-2)) @ source[1:]  # C_t, [T-2, M, M]
            row = (scale[1:-1] + target_log[:-1]).double().expand(core.shape[:2])
            product = product.times(tree_product(ScaledMatrix(row, core, source_log[1:].expand(core.shape[:2]))))
        right = ScaledMatrix(target_log[-1].double(), target[-1].mT @ weight[-1:].mT, scale[-1])
        found = product.times(right)
        z = SignedLog.of(found.core[0, 0], (found.row + found.column)[0])
        return z._replace(log=z.log.to(unary.dtype))

    def _factors(self, features: FeatureMap) -> Factors:
        """Factors of each transition, or of all if the first dimension is 1."""
        if not isinstance(features, FeatureMap):
            raise ValueError(f"features must be a feature map such as chain.random_features(64), not {features!r}.")
        e, transitions = self.embeddings, self.num_nodes - 1
        drawn = getattr(features, "projection", None)  # [draws, rows, n]
        draws, dim = (1, e.shape[-1]) if drawn is None else (drawn.shape[0], drawn.shape[-1])
        if dim != e.shape[-1] or draws not in (1, transitions):
            raise ValueError(
                f"These features have {dim} dimensions and {draws} draws, but the chain has {e.shape[-1]} dimensions "
                f"and {transitions} transitions, and needs 1 draw or {transitions}."
            )
        source, target = (e.expand(draws, -1, -1),) * 2 if e.dim() == 2 else (e[:-1], e[1:])
        queries, keys = features("query").exactly(source.unsqueeze(0)), features("key").exactly(target.unsqueeze(0))
        return Factors.of(*(Features(*(None if x is None else x[0] for x in f)) for f in (queries, keys)))  # type: ignore[arg-type]


def _positive(z: SignedLog) -> Tensor:
    """Return log Z; raise ValueError if Z is not positive."""
    if z.sign < 0:
        raise ValueError(
            "Z came out negative: the features are signed, and their noise is larger than Z. Use positive features, "
            "more features or smaller embeddings, or call log_partition(..., return_sign=True)."
        )
    if z.sign == 0:
        raise ValueError("Z is zero: are all states of a node forbidden?")
    return z.log
