"""Implementations of attention that are timed against each other, each with the definition it must agree with."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..mechanisms import Mechanism, MechanismConfig, resolve_config
from ..results import SOFTMAX, rounded
from .devices import DTYPES
from .settings import OpsSettings

LENGTH = 200  # of the check: neither a power of two nor a whole number of tiles
MAGNITUDE = 0.25  # of queries and keys in the check: small, so that the epsilons of peers do not decide it
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}

Key = tuple[str, str, int | None]


@dataclass(frozen=True)
class Contender:
    """`kind`: "softmax", "mechanism" or "peer". `features`: length of φ.

    `attend` takes q, k and v as this implementation likes them: `[B, H, L, D]`, or `[B, L, H, D]` with `length_first`.
    `weights` is the definition: the dense matrix `[B, H, L, L]` for q and k `[B, H, L, D]`. `tolerance`: how far from
    it the output may be, in float32.
    """

    kind: str
    name: str
    features: int | None
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: Callable[[Tensor, Tensor], Tensor]
    length_first: bool = False
    tolerance: float = TOLERANCE[torch.float32]
    mechanism: Mechanism | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name, self.features

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [] if self.mechanism is None else list(self.mechanism.parameters())

    def inputs(self, *tensors: Tensor) -> list[Tensor]:
        """`[B, H, L, D]` tensors as it likes them, contiguous."""
        return [(x.transpose(1, 2) if self.length_first else x).contiguous() for x in tensors]


def named_configs(names: Iterable[str]) -> dict[str, MechanismConfig]:
    """Configs of mechanisms, each once; an alias keeps its name only where it is more than another name.

    >>> list(named_configs(["performer", "favor+", "linear", "elu-"]))
    ['favor+', 'linear', 'elu-']
    """
    found = {}
    for name in names:
        config = resolve_config(name)
        found[config.name if config == resolve_config(config.name) else name] = config
    return found


def softmax(causal: bool) -> Contender:
    """torch's own, exact."""

    def weights(q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return (scores.masked_fill(future, -torch.inf) if causal else scores).softmax(-1)

    attend = partial(scaled_dot_product_attention, is_causal=causal)
    return Contender(SOFTMAX, SOFTMAX, None, attend, weights)


def mechanism(name: str, module: Mechanism, causal: bool) -> Contender:
    """One of this package."""
    attend, weights = partial(module, causal=causal), partial(module.attention_weights, causal=causal)
    return Contender("mechanism", name, module.num_features, attend, weights, mechanism=module)


def check(
    contender: Contender,
    shape: tuple[int, int, int],
    *,
    training: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    magnitude: float = MAGNITUDE,
) -> dict[str, Any]:
    """Compare a contender with its definition, computed in float64 from the same rounded numbers.

    `shape`: B, H, D. `magnitude`: standard deviation of queries and keys. The deviation is ‖ô - o‖/‖o‖; when
    `training`, the largest of those of the output and of the gradients of q, k and v.

    >>> found = check(softmax(causal=True), (1, 2, 8), training=True)
    >>> found["passed"], found["deviation"] < 1e-5
    (True, True)
    """
    B, H, D = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(B, H, LENGTH, D, generator=generator, dtype=torch.float64) for _ in range(4))
    given = [x.to(dtype).to(device) for x in (magnitude * q, magnitude * k, v, g)]

    def run(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(training) for x in tensors[:3]]
        out = attend(*leaves)
        return [
            out.detach(),
            *(torch.autograd.grad(out, leaves, tensors[3], materialize_grads=True) if training else ()),
        ]

    expected = run(lambda q, k, v: contender.weights(q, k) @ v, [x.double() for x in given])
    found = run(contender.attend, contender.inputs(*given))
    if contender.length_first:
        found = [x.transpose(1, 2) for x in found]
    # an average has no gradient of its queries and keys
    deviations = [
        float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, expected, strict=True)
    ]
    # not max() alone: NaN must not pass
    deviation = max(deviations) if all(map(math.isfinite, deviations)) else math.inf
    tolerance = max(contender.tolerance, TOLERANCE[dtype])
    return {
        "magnitude": magnitude,
        "deviation": rounded(deviation, 3) if math.isfinite(deviation) else None,
        "tolerance": tolerance,
        "passed": deviation <= tolerance,
    }


def check_all(
    contenders: Iterable[Contender], settings: OpsSettings, causal: bool, training: bool, dtype: str
) -> Iterator[dict[str, Any]]:
    """The checks of one kind of round. Peers are compared at the magnitude of real queries and keys too, for the
    record.
    """
    shape = settings.batch, settings.heads, settings.head_dim
    options: dict[str, Any] = {"training": training, "dtype": DTYPES[dtype], "device": settings.device}
    for contender in contenders:
        if contender.kind == "peer" and dtype != "float32":  # compiled kernels of peers know nothing else
            continue
        found = check(contender, shape, seed=settings.seed, **options)
        if contender.kind == "peer":
            large = check(contender, shape, seed=settings.seed, magnitude=1.0, **options)
            found |= {"deviation_at_magnitude_1": large["deviation"]}
        yield labels_of(contender.key, causal, training, dtype) | found


def labels_of(key: Key, causal: bool, training: bool, dtype: str) -> dict[str, Any]:
    """What checks and cells of a result are found by."""
    kind, name, features = key
    return {"kind": kind, "name": name, "features": features, "causal": causal, "training": training, "dtype": dtype}


def is_among(
    contender: Contender, checks: Iterable[Mapping[str, Any]], causal: bool, training: bool, dtype: str
) -> bool:
    """Whether one of these checks is of this contender in this kind of round."""
    labels = labels_of(contender.key, causal, training, dtype)
    return any(all(check[name] == value for name, value in labels.items()) for check in checks)
