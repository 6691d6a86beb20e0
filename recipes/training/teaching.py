"""Attention transfer before training; distillation and LoRA adapters during training."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import hf_rfattn
from hf_rfattn.results.documents import RESULTS

from .models import mechanism_parameters, read, read_config, with_pooling
from .options import RunOptions
from .session import TRANSFER, Session

LOGITS = ("logits", "start_logits", "end_logits")


def transfer(
    session: Session, model: PreTrainedModel, inputs: Iterable[Any], measure: Mapping[str, Any]
) -> dict[str, Any]:
    """Train the mechanisms of a patched model to imitate softmax, and return the field "transfer" of result files.

    `measure`: the batch on which errors are measured. With --save-every, an interrupted run resumes.
    """
    options = session.options
    given: dict[str, Any] = {"steps": options.transfer_steps, "rounds": 1}
    given["exact_heads"] = getattr(options, "exact_heads", 0.0)  # evaluate_lm.py has no such option
    if options.transfer_learning_rate is not None:
        given["learning_rate"] = options.transfer_learning_rate
    if options.save_every:
        given |= {"checkpoint": session.output / TRANSFER, "save_every": options.save_every}
    with session.accelerator.autocast():
        done = hf_rfattn.convert(model, None, inputs, measure=measure, **given)
    session.say(str(done))
    return {
        "steps": max(done.steps.values()),
        "batch_size": options.batch_size,
        "seconds": round(done.seconds, 3),
        "error": {"before": done.before.overall, "after": done.after.overall, "average": done.after.average},
    }


def recorded_transfer(model: str | None) -> dict[str, Any] | None:
    """Return the field "transfer" of the result files in the folder of a model; None if there is none."""
    for path in sorted((Path(model or "") / RESULTS).glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("transfer"):
            return {**document["transfer"], "dataset": document["dataset"]}
    return None


class Teacher:
    """A frozen softmax model, and the distillation loss of a student."""

    def __init__(self, model: PreTrainedModel, options: RunOptions):
        self.model = model.eval().requires_grad_(False)
        self.share, self.temperature = options.distill_weight, options.distill_temperature
        self.hidden = options.distill_hidden

    def loss(self, student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Weighted sum of the task loss and the distillation loss."""
        extra = {"output_hidden_states": True} if self.hidden else {}
        outputs = student(**batch, **extra)
        with torch.no_grad():
            taught = self.model(**batch, **extra)
        mask = batch.get("attention_mask")
        names = [name for name in LOGITS if getattr(outputs, name, None) is not None]
        distances = [self._distance(getattr(outputs, name), getattr(taught, name), mask) for name in names]
        loss = (1 - self.share) * outputs.loss + self.share * torch.stack(distances).mean()
        if self.hidden:
            pairs = zip(outputs.hidden_states[1:], taught.hidden_states[1:], strict=True)
            loss = loss + self.hidden * torch.stack([relative_error(a, b, mask) for a, b in pairs]).mean()
        return loss

    def _distance(self, given: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
        """KL divergence of the distributions over classes, tokens or answer positions; squared error for regression."""
        given, taught = given.float(), taught.float()
        if given.shape[-1] == 1:  # regression
            return F.mse_loss(given, taught)
        logs, wanted = ((x / self.temperature).log_softmax(-1) for x in (given, taught))
        divergence = (wanted.exp() * (wanted - logs)).sum(-1) * self.temperature**2
        if mask is not None and given.ndim == 3:  # a distribution per token
            return (divergence * mask).sum() / mask.sum()
        return divergence.mean()


def relative_error(given: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
    """‖given - taught‖² / ‖taught‖² over all tokens except padding."""
    weight = 1.0 if mask is None else mask[..., None]
    given, taught = given.float(), taught.float()
    return ((given - taught).square() * weight).sum() / (taught.square() * weight).sum()


def knows_task(student: PreTrainedModel, options: RunOptions) -> bool:
    """Whether --model is a softmax model with the head and labels of this task; False for language models."""
    config = read_config("--model", options.model)
    named = "LABEL_0" not in (config.id2label or {}).values() or config.problem_type == "regression"
    labels = [(c.problem_type, c.id2label) for c in (config, student.config)]
    kind = type(student).__name__
    answers = kind.endswith("ForQuestionAnswering") or (named and labels[0] == labels[1])
    return answers and kind in (config.architectures or ()) and not hasattr(config, "rfattn")


def make_teacher(device: torch.device, student: PreTrainedModel, options: RunOptions) -> Teacher | None:
    """Load the teacher of --distill, or None. By default, --model is the teacher if it was trained on this task and
    --transfer-steps is given.
    """
    if options.distill is None and options.transfer_steps and knows_task(student, options):
        options = dataclasses.replace(options, distill="self", distill_hidden=options.distill_hidden or 1.0)
    if options.distill in (None, "none"):
        return None
    name = options.model if options.distill == "self" else options.distill
    config = read_config("--distill", name)
    if type(student).__name__ not in (config.architectures or ()):
        raise ValueError(f"--distill: {name!r} has no head for this task. Give a softmax model that was trained on it.")
    model = with_pooling(read("--distill", type(student), name, config=config, dtype=torch.float32))
    if options.distill != "self" and hasattr(model.config, "rfattn"):
        raise ValueError(f"--distill: {name!r} is patched; the teacher must be a softmax model.")
    hf_rfattn.unpatch_model(model)
    positions, own = hf_rfattn.longest_input(student), hf_rfattn.longest_input(model)
    if options.extend_positions and positions and own and positions > own:
        hf_rfattn.extend_positions(model, positions, options.extend_positions)
    model.config.use_cache = False
    return Teacher(model.to(device), options)


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Freeze the model except head and mechanisms, and add LoRA adapters to all linear layers except the head."""
    from peft import LoraConfig, inject_adapter_in_model

    body = model.base_model
    inside = {id(m) for m in body.modules()}
    targets = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and id(m) in inside]
    own = mechanism_parameters(model)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    frozen = {id(p) for p in body.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) not in frozen or ".lora_" in name or name in own)


def without_adapters(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Merge LoRA adapters into the weights and restore the names of parameters."""
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
