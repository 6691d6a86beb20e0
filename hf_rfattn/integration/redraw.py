"""Redraws random projections: on demand with `redraw`, or on a schedule during training."""

import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..features import LearnedPositiveFeatures
from ..mechanisms.base import random_maps

M = TypeVar("M", bound=nn.Module)


def redraw(model: M) -> M:
    """Redraw all random projections of a model or mechanism, in place, and return it.

    The new projections depend only on the seed, the layer and the number of the draw, so they are the same on every
    rank and device. Trained projections are not redrawn. Raises ValueError if there is nothing to redraw.
    """
    maps = random_maps(model)
    if not maps and any(isinstance(m, LearnedPositiveFeatures) for m in model.modules()):
        raise ValueError("The projections of this model are trained (trainable=True); redrawing would undo that.")
    for feature_map in maps:
        feature_map.redraw()
    return model


class RedrawSchedule:
    """Forward pre-hook of a patched model. In training mode, the first forward pass after an optimizer step redraws the
    maps whose `redraw_interval` has passed. In eval mode, nothing is redrawn.

    All forward passes of one optimizer step use the same draw: with gradient accumulation, with several passes before
    one backward pass, and with gradient checkpointing. The schedule only sees optimizers derived from
    torch.optim.Optimizer that hold the model's parameters; in other loops, call `redraw(model)` between steps.
    """

    def __init__(self) -> None:
        self.stepped = True  # the first pass starts a new step
        self.trained: set[int] = set()  # ids of trainable parameters, to recognise optimizers of this model

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not module.training:
            return
        compiling = torch.compiler.is_compiling()
        if compiling or getattr(module, "_is_replica", False):
            raise NotImplementedError(
                f"A redraw schedule cannot run inside {'torch.compile' if compiling else 'nn.DataParallel'}. Patch "
                "with redraw_interval=None and call hf_rfattn.redraw(model) between steps of your training loop."
            )
        if self.stepped:
            for feature_map in random_maps(module):
                if feature_map.redraw_interval is not None:
                    feature_map.step()
        self.stepped, self.trained = False, {id(p) for p in module.parameters() if p.requires_grad}
        _SCHEDULES[id(self)] = self


_SCHEDULES: weakref.WeakValueDictionary[int, RedrawSchedule] = weakref.WeakValueDictionary()


def _note_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Hook of all torch optimizers. A frozen model, which is in none of them, counts the steps of each."""
    schedules = _SCHEDULES.valuerefs()
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]} if schedules else set()
    for reference in schedules:
        schedule = reference()
        if schedule is not None and not (schedule.trained and schedule.trained.isdisjoint(updated)):
            schedule.stepped = True


register_optimizer_step_post_hook(_note_step)
