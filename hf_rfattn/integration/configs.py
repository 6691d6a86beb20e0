"""Configs: a patched model has its own, whatever other models were made from the same object."""

import copy
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_MODELS: weakref.WeakValueDictionary[int, PreTrainedModel] = weakref.WeakValueDictionary()


def remember_model(model: PreTrainedModel) -> None:
    """For `own_configs` to find the models that another one is a part of."""
    _MODELS[id(model)] = model


def own_configs(model: nn.Module) -> None:
    """Replace the configs of a model, and of the models it is a part of, with copies.

    Models made from one config object share it, and what is written there for one of them is read by all. The parts of
    a model share a config too, and go on sharing the copy.
    """
    known = [reference() for reference in _MODELS.valuerefs()]
    wholes = [m for m in known if m is not None and any(part is model for part in m.modules())]
    modules = {id(m): m for whole in (*wholes, model) for m in whole.modules()}
    copies: dict[int, Any] = {}
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
