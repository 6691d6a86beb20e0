"""Benchmark of one attention layer by length: mechanisms and softmax.

A round has one direction, one pass and one length; its measurements are interleaved. Inference is a forward pass
without gradients; training is a forward pass and a backward pass to q, k, v and the parameters of the mechanism.
Softmax is torch's `scaled_dot_product_attention` (flash attention on a GPU in half precision). On a GPU, memory
allocations are measured too.
"""

import itertools
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..mechanisms import MechanismConfig, build_mechanism
from ..results.schema import SOFTMAX
from .loading import named_configs
from .measuring import COMPILED, DTYPES, Competitor, Document, Progress, Race, Row, measure_rounds, measuring
from .report import report
from .settings import OpsSettings

__all__ = ["configs", "measure", "report"]


def configs(settings: OpsSettings) -> list[tuple[str, MechanismConfig]]:
    """All combinations of mechanisms and numbers of features."""
    found = []
    for name, config in named_configs(settings.attention).items():
        if any(field.name == "num_features" for field in fields(config)):
            found += [(name, config.replace(num_features=count)) for count in settings.features]
        else:
            found.append((name, config))
    return found


def measure(settings: OpsSettings, progress: Progress = lambda share, doing: None) -> Document:
    """Run the benchmark and return its result document. `progress(share, doing)` is called with the progress."""
    named = configs(settings)
    layers: dict[Row, Callable[..., Tensor]] = {Row(SOFTMAX): scaled_dot_product_attention}

    def competitors(causal: bool, training: bool, dtype: str, length: int) -> dict[Row, Competitor]:
        generator = torch.Generator(settings.device).manual_seed(settings.seed)
        shape = settings.batch, settings.heads, length, settings.head_dim
        tensors = [
            torch.randn(shape, generator=generator, device=settings.device).to(DTYPES[dtype]) for _ in range(4)
        ]  # q, k, v, and the gradient of the output
        found = {}
        for row, layer in layers.items():
            attend = partial(layer, **{"is_causal" if row.attention == SOFTMAX else "causal": causal})
            parameters: list[Any] = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
            found[row] = competitor(attend, tensors, parameters, training)
        return found

    def columns(race: Race, row: Row) -> dict[str, Any]:
        return {} if settings.device == "cpu" else {"step_bytes": race.step_bytes(row, settings.device)}

    with measuring("bench ops", settings) as result:
        result["attention"] = [{"name": name, "config": config.to_dict()} for name, config in named]
        result["shape"] = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
        for name, config in named:
            sizes = {"num_heads": settings.heads, "head_dim": settings.head_dim, "seed": settings.seed}
            module = build_mechanism(config, **sizes).to(settings.device).eval()
            for path in settings.paths:
                layers[Row(name, module.num_features, path)] = torch.compile(module) if path == COMPILED else module
        rounds = [
            {"causal": causal, "training": training, "dtype": settings.dtype, "length": length}
            for causal, training, length in itertools.product(settings.directions, settings.passes, settings.lengths)
        ]
        measure_rounds(result, settings, rounds, competitors, columns, progress)
    return result


def competitor(
    attend: Callable[..., Tensor], tensors: list[Tensor], parameters: list[Tensor], training: bool
) -> Competitor:
    """A competitor that runs a forward pass, or forward and backward, on copies of q, k, v."""
    q, k, v = (x.detach().requires_grad_(training) for x in tensors[:3])

    @torch.no_grad()
    def infer() -> None:
        attend(q, k, v)

    def train() -> None:
        attend(q, k, v).backward(tensors[3])

    def forget() -> None:
        for tensor in (q, k, v, *parameters):
            tensor.grad = None

    return Competitor(train, forget) if training else Competitor(infer)
