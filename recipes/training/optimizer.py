"""The optimizer of the recipes, and its learning rate."""

import math

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
    if options.mechanism_learning_rate and not own:
        raise ValueError(
            "--mechanism-learning-rate: the attention of this model has no parameters. Leave the option out."
        )
    groups = [(matrices, rate, options.weight_decay), (vectors, rate, 0.0)]
    groups.append((own, options.mechanism_learning_rate or rate, 0.0))
    # fused: one pass over the weights per step instead of many, which matters on a CPU with a large vocabulary
    return AdamW([{"params": p, "lr": lr, "weight_decay": d, "peak": lr} for p, lr, d in groups if p], fused=True)


def rate_factor(step: int, steps: int, warmup: float, scheduler: str) -> float:
    """The share of the peak learning rate at a step (from 0): the schedule has no state but the step.

    >>> [round(rate_factor(step, 10, 2, "linear"), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    ramp = math.ceil(warmup * steps) if warmup < 1 else min(int(warmup), steps)
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[scheduler]
