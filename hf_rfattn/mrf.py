"""Linear-chain Markov random fields with transitions exp(xᵀy): exact inference, and inference with feature maps.

    p(x_1 … x_T) = exp(Σ_t u_t(x_t) + Σ_{t>1} e_{t-1}(x_{t-1})ᵀe_t(x_t)) / Z

over |X| states per node, each with an embedding e and a score u. The forward algorithm computes log Z in O(T|X|²). With
features, exp(xᵀy) ≈ φ(x)ᵀφ(y), the sums over states factorise:

    Z ≈ lᵀ C_2 … C_{T-1} r,   l = Σ_x exp(u_1) φ,   C_t = Σ_x exp(u_t) φφᵀ,   r = Σ_x exp(u_T) φ

- "serial" propagates the message lᵀC_2…C_t without computing C_t: O(T|X|M);
- "matrices" computes each C_t and multiplies the message by it: O(T|X|M²);
- "tree" computes all C_t and multiplies neighbours: O(T|X|M² + TM³) operations in log₂ T rounds.

All methods work with logarithms and signs, so they do not overflow. All are differentiable; marginals are gradients of
log Z.

Bias of random features: with an independent draw for each transition, Z is unbiased, since the expectations of
independent factors multiply; its logarithm is then too low on average (Jensen's inequality). With one draw for all
transitions, every factor is unbiased but their product is not if T > 2. Signed (trigonometric) features can make Z
negative, unless all nodes share the draw, embeddings and scores; this raises an error unless the sign is requested.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from .features import FeatureMap, PositiveFeatures
from .ops import Features

Method = Literal["serial", "matrices", "tree"]


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

    def normalised(self) -> tuple["SignedLog", Tensor]:
        """Shift to a largest logarithm of zero; also returns the shift in float64, since thousands are added up."""
        offset = largest(self.log, -1)
        return SignedLog(self.log - offset, self.sign), offset.squeeze(-1).double()

    def sum(self) -> "SignedLog":
        """Sum over the last dimension."""
        values, offset = self.scaled()
        return SignedLog.of(values.sum(-1), offset.squeeze(-1))


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

    def step(self, message: SignedLog) -> SignedLog:
        """Return the message of a node from the normalised message of the previous node, `[B, X]`."""
        sums = SignedLog.of((message.sign * message.log.exp()) @ self.source, self.source_log + self.target_log)
        values, offset = sums.scaled()
        return SignedLog.of(values @ self.target.mT, offset)

    def log_kernel(self) -> Tensor:
        """log φ(x)ᵀφ(y), `[..., X, X]`, of positive features."""
        scale = self.source_log + self.target_log
        offset = largest(scale, -1)
        values = (self.source * torch.exp(scale - offset).unsqueeze(-2)) @ self.target.mT
        return SignedLog.of(values, offset.unsqueeze(-1)).log


def exact_step(scores: Tensor, message: SignedLog) -> SignedLog:
    """`Factors.step` for exact transitions exp(scores), `[X, X]` or `[B, X, X]`, and positive messages."""
    log = torch.logsumexp(message.log.unsqueeze(-1) + scores, dim=-2)
    return SignedLog(log, torch.ones_like(log))


def tree_product(matrices: ScaledMatrix) -> ScaledMatrix:
    """Product over dimension 1, multiplying neighbours in log₂ rounds."""
    while (count := matrices.core.shape[1]) > 1:
        even = count // 2 * 2
        left, right = (ScaledMatrix(*(x[:, start:even:2] for x in matrices)) for start in (0, 1))
        product = left.times(right)
        if even < count:
            product = ScaledMatrix(*(torch.cat([x, y[:, -1:]], 1) for x, y in zip(product, matrices, strict=True)))
        matrices = product
    return ScaledMatrix(*(x[:, 0] for x in matrices))


def largest(log: Tensor, dim: int) -> Tensor:
    """The detached maximum, finite even if all values are -inf."""
    return log.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(log.dtype).min)


class LinearChainMRF:
    """A linear-chain Markov random field with transitions exp(e(x)ᵀe(y)).

    `embeddings`: `[X, n]`, shared by all nodes, or `[T, X, n]`. `length`: number of nodes T, or a list of lengths for a
    batch of chains with common first nodes; by default that of the embeddings. `unary`: scores u, `[X]`, `[T, X]`, or
    `[B, T, X]` for a batch; -inf forbids a state.

    Results have a batch dimension if lengths or scores have one.

    >>> chain = LinearChainMRF(torch.zeros(3, 2), length=4)
    >>> chain.log_partition().exp()  # 3⁴ sequences of weight 1
    tensor(81.0000)
    >>> chain.log_partition(chain.random_features(16)).exp()
    tensor(81.0000)
    >>> chain.marginals()[0]
    tensor([0.3333, 0.3333, 0.3333])
    """

    def __init__(
        self, embeddings: Tensor, length: int | Sequence[int] | Tensor | None = None, unary: Tensor | None = None
    ):
        if embeddings.dim() not in (2, 3) or not embeddings.is_floating_point():
            raise ValueError(
                f"embeddings must be floating-point tensors [states, n] or [T, states, n], not {embeddings.dtype} "
                f"{tuple(embeddings.shape)}."
            )
        if length is None:
            if embeddings.dim() == 2:
                raise ValueError("Embeddings [states, n] are shared by all nodes: give their number, length=T.")
            length = len(embeddings)
        lengths = torch.as_tensor(length, dtype=torch.long, device=embeddings.device)
        if lengths.dim() > 1 or not lengths.numel() or int(lengths.min()) < 1:
            raise ValueError(f"length must be a positive integer or a list of them, not {length!r}.")
        longest = int(lengths.max())
        if embeddings.dim() == 3 and len(embeddings) < longest:
            raise ValueError(f"A chain of {longest} nodes needs embeddings for all of them, not for {len(embeddings)}.")
        dtype = torch.promote_types(embeddings.dtype, torch.float32)
        self.embeddings = embeddings.to(dtype)
        if embeddings.dim() == 3:
            self.embeddings = self.embeddings[:longest]
        self.num_nodes, self.num_states = longest, embeddings.shape[-2]
        self.lengths = lengths.reshape(-1)
        self.unary = self._checked_unary(unary)  # [B or 1, T or 1, X]
        self.batch = max(len(self.lengths), len(self.unary))
        self.batched = lengths.dim() == 1 or (unary is not None and unary.dim() == 3)

    def _checked_unary(self, unary: Tensor | None) -> Tensor:
        if unary is None:
            return self.embeddings.new_zeros(1, 1, self.num_states)
        given = tuple(unary.shape)
        fits = unary.dim() in (1, 2, 3) and given[-1] == self.num_states
        fits = fits and (unary.dim() == 1 or given[-2] >= self.num_nodes)
        fits = fits and (unary.dim() < 3 or len(self.lengths) in (1, given[0]))
        if not fits:
            raise ValueError(
                f"unary must be [X], [T, X] or [B, T, X] with X = {self.num_states}, T = {self.num_nodes}"
                f"{f', B = {len(self.lengths)}' if len(self.lengths) > 1 else ''}, not {given}."
            )
        while unary.dim() < 3:
            unary = unary.unsqueeze(0)
        return unary[:, : self.num_nodes].to(self.embeddings)

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
        """Compute log Z, exactly or with `features` by one of three methods (for their cost, see `hf_rfattn.mrf`).

        With `return_sign`, returns the sign of Z and log |Z|. Without it, raises ValueError if Z is not positive.

        >>> chain = LinearChainMRF(torch.randn(5, 3), length=[2, 7])
        >>> chain.log_partition(chain.random_features(8), method="tree").shape
        torch.Size([2])
        """
        z = self._partition(features, method, self.unary)
        log, sign = z if self.batched else SignedLog(*(x.squeeze(0) for x in z))
        return (sign, log) if return_sign else _positive(z).reshape(log.shape)

    def marginals(self, features: FeatureMap | None = None, *, method: Method = "serial") -> Tensor:
        """Compute p(x_t), `[T, X]` or `[B, T, X]`, as the gradient of log Z. Zero after the end of a chain.

        With signed features, the values may lie outside [0, 1].
        """
        with torch.enable_grad():
            shift = self.unary.new_zeros(self.batch, self.num_nodes, self.num_states).requires_grad_()
            z = self._partition(features, method, self.unary.detach() + shift)
            (found,) = torch.autograd.grad(_positive(z).sum(), shift)
        return found if self.batched else found.squeeze(0)

    def pairwise_marginals(self, features: FeatureMap | None = None) -> Tensor:
        """Compute p(x_t, x_{t+1}), `[T-1, X, X]` or `[B, T-1, X, X]`, as the gradient of log Z with respect to the log
        transitions e(x)ᵀe(y) or log φ(x)ᵀφ(y).

        These are computed as a dense matrix, which is as large as the result. Features must be positive.
        """
        scores = self._scores(features).detach()
        scores = scores.expand(self.batch, self.num_nodes - 1, -1, -1).clone().requires_grad_()
        with torch.enable_grad():
            steps: list[Any] = [partial(exact_step, one) for one in scores.unbind(1)]
            unary = self.unary.detach().expand(self.batch, -1, -1)
            (found,) = torch.autograd.grad(_positive(self._close(*self._forward(steps, unary))).sum(), scores)
        return found if self.batched else found.squeeze(0)

    def log_prob(self, states: Tensor, features: FeatureMap | None = None, *, method: Method = "serial") -> Tensor:
        """Compute log p of sequences `[N, T]`, or `[B, T]` with one per chain of a batch. States after the end of a
        chain are ignored.

        With positive `features`, the transitions are φ(x)ᵀφ(y), so probabilities sum to one.
        """
        if states.dim() != 2 or states.shape[1] != self.num_nodes or (self.batched and len(states) != self.batch):
            rows = self.batch if self.batched else "N"
            raise ValueError(f"states must be [{rows}, {self.num_nodes}], not {tuple(states.shape)}.")
        inside = torch.arange(self.num_nodes, device=states.device) < self.lengths[:, None]  # [B or 1, T]
        states = states.masked_fill(~inside, 0)
        if states.numel() and not 0 <= int(states.min()) <= int(states.max()) < self.num_states:
            raise ValueError(f"states must be between 0 and {self.num_states - 1}.")
        unary = self.unary.expand(len(states), self.num_nodes, -1)
        score = unary.gather(-1, states.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0).sum(-1)
        pairs = self._pair_scores(states, features).masked_fill(~inside[:, 1:], 0)
        return score + pairs.sum(-1) - self.log_partition(features, method=method)

    @torch.no_grad()
    def sample(self, count: int, features: FeatureMap | None = None, *, generator: Generator | None = None) -> Tensor:
        """Sample sequences `[count, T]` or `[B, count, T]` by forward filtering and backward sampling; -1 after the end
        of a chain.

        Samples are exact, with positive `features` for the chain with transitions φ(x)ᵀφ(y).
        """
        log_kernel = self._scores(features)
        messages = self._forward(self._steps(features), self.unary)[0].log.expand(self.batch, -1, -1)  # [B, T, X]
        B, T, X = messages.shape
        states = torch.full((B, count, T), -1, device=messages.device)
        following = states[..., 0]
        for t in reversed(range(T)):
            logits = messages[:, t, None, :].expand(B, count, X)
            if t + 1 < T:
                columns = log_kernel[t if len(log_kernel) > 1 else 0].T[following.clamp(min=0)]  # [B, count, X]
                last = (self.lengths == t + 1)[:, None, None]
                logits = torch.where(last, logits, logits + columns)
            drawn = torch.multinomial(logits.softmax(-1).reshape(-1, X), 1, generator=generator).view(B, count)
            following = torch.where((self.lengths > t)[:, None], drawn, -1)
            states[:, :, t] = following
        return states if self.batched else states.squeeze(0)

    def _partition(self, features: FeatureMap | None, method: Method, unary: Tensor) -> SignedLog:
        """Z of every chain, `[B]`."""
        if method not in get_args(Method):
            raise ValueError(f"Unknown method {method!r}; choose one of {', '.join(get_args(Method))}.")
        if method == "serial" or self.num_nodes == 1:
            return self._close(*self._forward(self._steps(features), unary))
        if features is None:
            raise ValueError(f"method={method!r} needs features; give them, or use method='serial'.")
        return self._matrix_product(self._factors(features), unary, method)

    def _steps(self, features: FeatureMap | None) -> list[Any]:
        """Functions that propagate a message over each transition, exact or with features."""
        steps: list[Any]
        if features is None:
            steps = [partial(exact_step, scores) for scores in self._scores(None).unbind()]
        else:
            factors = self._factors(features)
            steps = [Factors(*one).step for one in zip(*(x.unbind() for x in factors), strict=True)]
        return steps * (self.num_nodes - 1) if len(steps) == 1 else steps

    def _forward(self, steps: list[Any], unary: Tensor) -> tuple[SignedLog, Tensor]:
        """Forward messages of every node, `[B or 1, T, X]`, and offsets to add to their logarithms, `[B or 1, T]`."""
        scores = unary.unbind(1) if unary.shape[1] > 1 else [unary[:, 0]] * self.num_nodes
        message, total = SignedLog(scores[0], torch.ones_like(scores[0])).normalised()
        messages, totals = [message], [total]
        for step, score in zip(steps[: self.num_nodes - 1], scores[1:], strict=True):
            message = step(message)
            message, offset = SignedLog(message.log + score, message.sign).normalised()
            messages.append(message)
            totals.append(totals[-1] + offset)
        return SignedLog(*(torch.stack(x, dim=1) for x in zip(*messages, strict=True))), torch.stack(totals, dim=1)

    def _close(self, messages: SignedLog, totals: Tensor) -> SignedLog:
        """Z from the messages of the last node of each chain."""
        chain, last = torch.arange(self.batch, device=totals.device), self._last
        z = SignedLog(*(x.expand(self.batch, -1, -1)[chain, last] for x in messages)).sum()
        return SignedLog((z.log + totals.expand(self.batch, -1)[chain, last]).to(z.log.dtype), z.sign)

    @property
    def _last(self) -> Tensor:
        """The last node of every chain, `[B]`."""
        return (self.lengths - 1).expand(self.batch)

    def _matrix_product(self, factors: Factors, unary: Tensor, method: Method) -> SignedLog:
        """lᵀ C_2 … C_{T-1} r, with identity matrices after the end of a chain."""
        scale = largest(unary, -1)
        weight = torch.exp(unary - scale)  # [B or 1, T or 1, X]
        left = (weight[:, 0] @ factors.source[0]).unsqueeze(1)  # [B or 1, 1, M]
        product = [ScaledMatrix(scale[:, 0].double(), left, factors.source_log[0])]
        if self.num_nodes > 2:
            inner = self._inner_matrices(factors, weight, scale)
            one_by_one = zip(*(x.unbind(1) for x in inner), strict=True)
            product += [tree_product(inner)] if method == "tree" else [ScaledMatrix(*one) for one in one_by_one]
        chain, end = torch.arange(self.batch, device=weight.device), self._last.clamp(max=weight.shape[1] - 1)
        transition = (self._last - 1).clamp(min=0, max=len(factors.target) - 1)
        right = factors.target[transition].mT @ weight.expand(self.batch, -1, -1)[chain, end].unsqueeze(2)  # [B, M, 1]
        offset = scale.expand(self.batch, -1, -1)[chain, end]
        product.append(ScaledMatrix(factors.target_log[transition].double(), right, offset))
        found = reduce(ScaledMatrix.times, product)
        z = SignedLog.of(found.core[:, 0, 0], (found.row + found.column)[:, 0])
        alone = SignedLog(unary[:, 0], torch.ones_like(unary[:, 0])).sum()  # chains of one node have no transitions
        return SignedLog(*(torch.where(self._last == 0, x, y.to(x.dtype)) for x, y in zip(alone, z, strict=True)))

    def _inner_matrices(self, factors: Factors, weight: Tensor, scale: Tensor) -> ScaledMatrix:
        """C_2 … C_{T-1} of every chain, `[B, T-2, M, M]`."""
        if weight.shape[1] > 1:
            weight, scale = weight[:, 1:-1], scale[:, 1:-1]
        source, source_log, target, target_log = factors
        if len(source) > 1:
            source, source_log, target, target_log = source[1:], source_log[1:], target[:-1], target_log[:-1]
        core = (target.mT * weight.unsqueeze(-2)) @ source  # [B or 1, T-2 or 1, M, M]
        M = core.shape[-1]
        shape = self.batch, self.num_nodes - 2, M
        node = torch.arange(1, self.num_nodes - 1, device=core.device)
        inside = (node < self._last[:, None]).unsqueeze(-1)  # [B, T-2, 1]
        return ScaledMatrix(
            torch.where(inside, scale + target_log, 0).double().expand(shape),
            torch.where(inside.unsqueeze(-1), core, torch.eye(M, dtype=core.dtype, device=core.device)),
            torch.where(inside, source_log, 0).expand(shape),
        )

    def _scores(self, features: FeatureMap | None) -> Tensor:
        """Logarithms of the transitions, `[1 or T-1, X, X]`."""
        if features is not None:
            return self._factors(features, positive=True).log_kernel()
        if self.embeddings.dim() == 2:
            return (self.embeddings @ self.embeddings.mT).unsqueeze(0)
        return self.embeddings[:-1] @ self.embeddings[1:].mT

    def _pair_scores(self, states: Tensor, features: FeatureMap | None) -> Tensor:
        """Logarithms of the transitions along given sequences, `[N, T-1]`."""
        before, after = states[:, :-1], states[:, 1:]
        t = torch.arange(self.num_nodes - 1, device=states.device)
        if features is None:
            e = self.embeddings.expand(self.num_nodes, -1, -1)
            return (e[t, before] * e[t + 1, after]).sum(-1)
        source, source_log, target, target_log = self._factors(features, positive=True)
        t = t if len(source) > 1 else torch.zeros_like(t)
        scale = (source_log + target_log)[t]  # [T-1, M]
        offset = largest(scale, -1)
        products = source[t, before] * target[t, after] * torch.exp(scale - offset)
        return SignedLog.of(products.sum(-1), offset.squeeze(-1)).log

    def _factors(self, features: FeatureMap, positive: bool = False) -> Factors:
        """Factors of each transition, or of all if the first dimension is 1. `positive`: raise for signed features."""
        if not isinstance(features, FeatureMap):
            raise ValueError(f"features must be a feature map such as chain.random_features(64), not {features!r}.")
        if positive and not features.positive:
            raise ValueError(
                f"{type(features).__name__} are signed, but probabilities need positive transitions; use positive "
                "features."
            )
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
    negative, zero = int((z.sign < 0).sum()), int((z.sign == 0).sum())
    if negative:
        raise ValueError(
            f"Z came out negative for {negative} of {z.sign.numel()} chains: the features are signed, and their noise "
            "is larger than Z. Use positive features, more features or smaller embeddings, or call "
            "log_partition(..., return_sign=True)."
        )
    if zero:
        raise ValueError(f"Z is zero for {zero} of {z.sign.numel()} chains: are all states of a node forbidden?")
    return z.log
