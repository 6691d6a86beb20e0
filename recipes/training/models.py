"""Loading a model and its tokenizer for a task, giving the model its attention, and its optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_rfattn

from .options import CommonOptions, RunOptions


def read(option: str, kind: Any, name: Any, **arguments: Any) -> Any:
    """`from_pretrained`, with an error of one line that names the option."""
    if name is None:
        raise ValueError(f"{option} is missing. Give the folder of a model, or its name on the Hub.")
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **arguments)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).strip().partition("\n\n")[0].split())[:300]
        raise ValueError(f"{option}: {name!r} cannot be loaded. {reason}") from error


def read_config(option: str, name: str | None, **changes: Any) -> PreTrainedConfig:
    """The config of a model in a folder or on the Hub, with some fields changed."""
    return read(option, AutoConfig, name, **changes)


def load_tokenizer(options: CommonOptions) -> PreTrainedTokenizerBase:
    """A tokenizer with a padding token. GPT-2 and its kin have none; any other will do, since padding is masked."""
    option = "--tokenizer" if options.tokenizer else "--model"
    tokenizer = read(option, AutoTokenizer, options.tokenizer or options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_model(
    auto_class: Any, options: CommonOptions, tokenizer: PreTrainedTokenizerBase, **changes: Any
) -> PreTrainedModel:
    """The model with a head for the task, in float32. `changes`: fields of its config."""
    config = read_config("--model", options.model, **changes)
    if pooling := getattr(options, "pooling", None):
        config.classifier_pooling = pooling
    # a head for another number of labels, as of a model trained on another task, is replaced by a new one
    replaced = {"ignore_mismatched_sizes": True}
    model = read("--model", auto_class, options.model, config=config, dtype=torch.float32, **replaced)
    model.config.pad_token_id = tokenizer.pad_token_id  # decoders classify by the last token before padding
    return with_pooling(model)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, also where modules keep it as a number, as those of Llama do."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def with_pooling(model: PreTrainedModel) -> PreTrainedModel:
    """Let the head of an encoder read what `classifier_pooling` of the config says; ModernBERT does so by itself."""
    kind, pooler = getattr(model.config, "classifier_pooling", None), getattr(model.base_model, "pooler", None)
    if kind in ("cls", "mean") and pooler is not None:
        model.base_model.pooler = pooling = Pooling(kind)
        model.base_model.register_forward_pre_hook(pooling.remember_mask, with_kwargs=True)
    elif kind is not None and pooler is None and not hasattr(type(model.config)(), "classifier_pooling"):
        raise ValueError(f"--pooling {kind}: {type(model).__name__} has no pooler to replace; leave the option out.")
    return model


class Pooling(nn.Module):
    """Takes the place of the pooler of a BERT-like encoder. `kind`: cls or mean."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.mask = kind, None

    def remember_mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the encoder's forward, which does not hand the mask on to its pooler."""
        self.mask = kwargs.get("attention_mask")

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, D] → [B, D]; padding does not count."""
        if self.kind == "cls":
            return hidden[:, 0]
        weights = torch.ones_like(hidden[..., :1]) if self.mask is None else self.mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def set_attention(model: PreTrainedModel, options: CommonOptions) -> None:
    """Patch or unpatch as --attention says; without it the model stays as it is."""
    if options.attention == "softmax":
        hf_rfattn.unpatch_model(model)
    elif options.attention is not None:
        config = hf_rfattn.parse_attention(options.attention, options.attention_options)
        hf_rfattn.patch_model(model, config, layers=options.layers, seed=options.seed)


def attention_of(model: PreTrainedModel) -> Any:
    """A model's attention as result files name it: "softmax", a mechanism's document, or one by layers."""
    spec = getattr(model.config, "rfattn", None)
    if spec is None:
        return "softmax"
    layers = spec["layers"]
    last = getattr(model.config, "num_hidden_layers", 0) - 1
    everywhere = "0" if last == 0 else f"0-{last}"
    return layers[everywhere] if list(layers) == [everywhere] else {"layers": layers}


def mechanism_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that belong to mechanisms."""
    prefixes = [name for name, module in model.named_modules() if isinstance(module, hf_rfattn.Mechanism)]
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{p}.") for p in prefixes)}


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


def choose_length(
    model: PreTrainedModel, options: CommonOptions, usual: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """The length to cut at: what was asked for, or what is usual for the task, as far as it fits.

    With --extend-positions the model, and the limit of the tokenizer, grow to what was asked for.
    """
    limit, wanted = hf_rfattn.longest_input(model), options.max_length
    if wanted is None:
        return usual if limit is None else min(usual, limit)
    if limit is not None and wanted > limit:
        if options.extend_positions is None:
            raise ValueError(
                f"--max-length {wanted} exceeds the {limit} positions of this model. Choose at most {limit}, or extend "
                "the position table with --extend-positions tile."
            )
        hf_rfattn.extend_positions(model, wanted, options.extend_positions, tokenizer=tokenizer)
    return wanted


@dataclass(frozen=True)
class Collator:
    """Rows of token lists → tensors, as long as the longest row. `others`: what fills further columns.

    Padded on the right, whatever the tokenizer's side: encoders classify by the first token, decoders by the last one
    that is not padding, and both count positions from the first column.
    """

    tokenizer: PreTrainedTokenizerBase
    others: dict[str, int] = field(default_factory=dict)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        padding = {"input_ids": self.tokenizer.pad_token_id or 0, "attention_mask": 0}  # any id: padding is masked
        padding |= {"token_type_ids": self.tokenizer.pad_token_type_id, **self.others}
        batch = {}
        for name in rows[0]:
            cells = [torch.as_tensor(row[name]) for row in rows]
            if name in padding:
                batch[name] = nn.utils.rnn.pad_sequence(cells, batch_first=True, padding_value=padding[name])
            elif name != "length":  # examples are grouped by it; models do not read it
                batch[name] = torch.stack(cells)
        return batch
