"""New random draws for the projections of a model: on demand, and on a schedule during training."""

from typing import TypeVar

import torch
from torch import nn

from ..features import LearnedPositiveFeatures
from ..mechanisms.base import random_maps

M = TypeVar("M", bound=nn.Module)


def redraw(model: M) -> M:
    """Give every random projection of a model (or of one mechanism) its next draw; returns the model.

    The draw depends on the seed, the layer and the number of the draw alone, so it is the same on every rank and
    device. Trained projections are not drawn anew: a model that has no others raises ValueError.
    """
    maps = random_maps(model)
    if not maps and any(isinstance(m, LearnedPositiveFeatures) for m in model.modules()):
        raise ValueError("The projections of this model are trained (trainable=True); a new draw would undo that.")
    for feature_map in maps:
        feature_map.redraw()
    return model


def redraw_on_schedule(module: nn.Module, args: tuple) -> None:
    """Forward pre-hook of a patched model: in training, redraw the maps whose `redraw_interval` has passed. Eval never
    redraws.

    It sits on the model, not on its layers, so that gradient checkpointing, which runs layers twice, cannot run it
    twice.
    """
    if not module.training:
        return
    scheduled = [m for m in random_maps(module) if m.redraw_interval is not None]
    if scheduled and torch.compiler.is_compiling():
        raise NotImplementedError(
            "A redraw schedule cannot run inside torch.compile. Patch with redraw_interval=None and call "
            "hf_rfattn.redraw(model) between steps of your training loop."
        )
    for feature_map in scheduled:
        feature_map.step()
