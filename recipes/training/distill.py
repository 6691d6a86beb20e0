"""Learning from a softmax model besides the task: its logits and, if asked for, its hidden states."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_rfattn

from .models import attention_of, has_new_head
from .options import RunOptions

LOGITS = ("logits", "start_logits", "end_logits")
SELF = "self"


class Teacher:
    """A softmax model that does not learn."""

    def __init__(self, model: PreTrainedModel, options: RunOptions):
        self.model = model.eval().requires_grad_(False)
        self.share, self.temperature = options.distill_weight, options.distill_temperature
        self.hidden = options.distill_hidden

    def loss(self, student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The task's loss and the distance to the teacher, weighed."""
        extra = {"output_hidden_states": True} if self.hidden else {}
        outputs = student(**batch, **extra)
        with torch.no_grad():
            taught = self.model(**batch, **extra)
        mask = batch.get("attention_mask")
        names = [name for name in LOGITS if getattr(outputs, name, None) is not None]
        distance = torch.stack(
            [self._distance(getattr(outputs, name), getattr(taught, name), mask) for name in names]
        ).mean()
        loss = (1 - self.share) * outputs.loss + self.share * distance
        if self.hidden:
            pairs = list(zip(outputs.hidden_states[1:], taught.hidden_states[1:], strict=True))
            loss = loss + self.hidden * torch.stack([relative_error(a, b, mask) for a, b in pairs]).mean()
        return loss

    def _distance(self, given: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
        """Divergence of the classes that logits stand for: those of a row, of each token, or the tokens themselves."""
        given, taught = given.float(), taught.float()
        if given.shape[-1] == 1:  # a score
            return F.mse_loss(given, taught)
        logs, wanted = ((x / self.temperature).log_softmax(-1) for x in (given, taught))
        divergence = (wanted.exp() * (wanted - logs)).sum(-1) * self.temperature**2
        if mask is not None and given.ndim == 3:  # one a token
            return (divergence * mask).sum() / mask.sum()
        return divergence.mean()


def relative_error(given: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
    """‖a - b‖² / ‖b‖² over the tokens that are not padding."""
    weight = 1.0 if mask is None else mask[..., None]
    given, taught = given.float(), taught.float()
    return ((given - taught).square() * weight).sum() / (taught.square() * weight).sum()


def make_teacher(accelerator: Accelerator, student: PreTrainedModel, options: RunOptions) -> Teacher | None:
    """The model of --distill, beside a student that has not been trained yet."""
    if options.distill is None:
        return None
    if options.distill == SELF and has_new_head(student, options):
        raise ValueError(
            "--distill self: the head of --model is new, so its logits teach nothing. Give the folder of a softmax "
            "model that was trained on this task."
        )
    name = options.model if options.distill == SELF else options.distill
    try:
        model = type(student).from_pretrained(name, dtype=torch.float32)
    except OSError as error:
        raise ValueError(
            f"--distill {options.distill!r} cannot be read: {' '.join(str(error).split())[:300]}"
        ) from error
    if attention_of(model) != "softmax":
        if options.distill != SELF:
            raise ValueError(f"--distill {options.distill!r} is patched; the teacher must be a softmax model.")
        hf_rfattn.unpatch_model(model)
    for name in ("num_labels", "vocab_size"):
        there, expected = getattr(model.config, name, None), getattr(student.config, name, None)
        if there != expected:
            raise ValueError(f"--distill {options.distill!r}: its {name} is {there}, the student's {expected}.")
    model.config.use_cache = False
    return Teacher(model.to(accelerator.device), options)
