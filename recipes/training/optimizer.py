"""AdamW in groups, and the learning rate as a function of the step."""

import math

import torch
from torch import nn
from torch.optim import AdamW

from .models import mechanism_parameters
from .options import RunOptions


def make_optimizer(model: nn.Module, options: RunOptions) -> AdamW:
    """Matrices decay; biases, norms and mechanisms do not; mechanisms have a learning rate of their own."""
    mechanisms = mechanism_parameters(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own = [p for name, p in named.items() if name in mechanisms]
    matrices = [p for name, p in named.items() if name not in mechanisms and p.ndim > 1]
    vectors = [p for name, p in named.items() if name not in mechanisms and p.ndim <= 1]
    rate = options.learning_rate
    own_rate = options.mechanism_learning_rate or rate
    if options.mechanism_learning_rate and not own:
        raise ValueError("--mechanism-learning-rate: this model's attention has no parameters of its own.")
    groups = [
        {"params": matrices, "lr": rate, "weight_decay": options.weight_decay},
        {"params": vectors, "lr": rate, "weight_decay": 0.0},
        {"params": own, "lr": own_rate, "weight_decay": 0.0},
    ]
    # fused: one pass over the weights a step instead of many, which tells on a CPU with a large vocabulary
    return AdamW([{**group, "peak": group["lr"]} for group in groups if group["params"]], fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group at this share of its highest rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def rate_factor(step: int, steps: int, warmup: float, scheduler: str) -> float:
    """The share of the highest rate that step number `step` (from 0) uses: the schedule has no state but the step.

    >>> [round(rate_factor(step, 10, 2, "linear"), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    ramp = math.ceil(warmup * steps) if warmup < 1 else min(int(warmup), steps)
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    if scheduler == "linear":
        return 1 - done
    if scheduler == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1.0
