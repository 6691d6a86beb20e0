"""LoRA: small matrices beside those of the model are trained instead of them; saved models have them added in."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .models import mechanism_parameters


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Beside every matrix of the model's body, which itself stays as it is; head and mechanisms are trained whole."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("--lora-rank needs peft: pip install peft.") from error
    body = model.base_model
    inside = {id(m) for m in body.modules()}
    targets = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and id(m) in inside]
    own = mechanism_parameters(model)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    frozen = {id(p) for p in body.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) not in frozen or ".lora_" in name or name in own)


def without_adapters(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The weights of a plain model: adapters added in, names as they were."""
    merged = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if plain != name and name.endswith(".weight"):
            layer: Any = model.get_submodule(name.removesuffix(".base_layer.weight"))
            value = value + layer.get_delta_weight("default").detach().to(value.device, value.dtype)
        merged[plain] = value
    return merged
