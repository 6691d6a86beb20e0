"""Loads models and tokenizers, sets their attention, and creates batches and the optimizer."""

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
    """Call `from_pretrained`. Errors are one line and name the command-line option."""
    if name is None:
        raise ValueError(f"{option} is missing. Give the folder of a model, or its name on the Hub.")
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **arguments)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).strip().partition("\n\n")[0].split())[:300]
        raise ValueError(f"{option}: {name!r} cannot be loaded. {reason}") from error


def read_config(option: str, name: str | None, **changes: Any) -> PreTrainedConfig:
    """Load the config of a model and change some of its fields."""
    return read(option, AutoConfig, name, **changes)


def load_tokenizer(options: CommonOptions) -> PreTrainedTokenizerBase:
    """Load the tokenizer. If it has no padding token, as in GPT-2, use another token, since padding is masked."""
    option, name = ("--tokenizer", options.tokenizer) if options.tokenizer else ("--model", options.model)
    tokenizer = read(option, AutoTokenizer, name)
    check_vocabulary(tokenizer, f"{option} {name}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, of: str) -> None:
    """Raise ValueError for a tokenizer of special tokens only, which transformers creates if a model has none."""
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(f"{of} has no tokenizer. Save one in this folder, or choose one with --tokenizer.")


def load_model(
    auto_class: Any, options: CommonOptions, tokenizer: PreTrainedTokenizerBase, **changes: Any
) -> PreTrainedModel:
    """Load the model with a head for the task, in float32. `changes`: fields of its config."""
    config = read_config("--model", options.model, **changes)
    if pooling := getattr(options, "pooling", None):
        config.classifier_pooling = pooling
    # ignore_mismatched_sizes replaces a head for another number of labels, from training on another task
    how: dict[str, Any] = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    model = read("--model", auto_class, options.model, **how)
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
    """Replace the pooler of an encoder as `classifier_pooling` of its config says; ModernBERT supports it itself."""
    kind, pooler = getattr(model.config, "classifier_pooling", None), getattr(model.base_model, "pooler", None)
    if kind in ("cls", "mean") and pooler is not None:
        model.base_model.pooler = pooling = Pooling(kind)
        model.base_model.register_forward_pre_hook(pooling.remember_mask, with_kwargs=True)
    elif kind is not None and pooler is None and not hasattr(type(model.config)(), "classifier_pooling"):
        raise ValueError(f"--pooling {kind}: {type(model).__name__} has no pooler to replace; leave the option out.")
    return model


class Pooling(nn.Module):
    """Replacement for the pooler of a BERT-like encoder. `kind`: cls or mean."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.mask = kind, None

    def remember_mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the encoder: stores the attention mask, which the encoder does not pass to its pooler."""
        self.mask = kwargs.get("attention_mask")

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, D] → [B, D], without padding."""
        if self.kind == "cls":
            return hidden[:, 0]
        weights = torch.ones_like(hidden[..., :1]) if self.mask is None else self.mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)


def set_attention(model: PreTrainedModel, options: CommonOptions) -> None:
    """Patch or unpatch the model according to --attention. Without this option, the model is not changed."""
    if options.attention == "softmax":
        hf_rfattn.unpatch_model(model)
    elif options.attention is not None:
        config = hf_rfattn.parse_attention(options.attention, options.attention_options)
        if getattr(options, "exact_heads", 0.0):
            try:
                hf_rfattn.ExactHeadsConfig(rest=config)
            except ValueError as error:
                raise ValueError(
                    "--exact-heads needs a linear mechanism such as hedgehog or favor+, not "
                    f"{config.name}. Leave it out, or choose another --attention."
                ) from error
        hf_rfattn.patch_model(model, config, layers=options.layers, seed=options.seed)


def attention_of(model: PreTrainedModel) -> Any:
    """Return the attention of a model as in result files: "softmax", a mechanism, or mechanisms by layer."""
    spec = getattr(model.config, "rfattn", None)
    if spec is None:
        return "softmax"
    layers = spec["layers"]
    last = getattr(model.config, "num_hidden_layers", 0) - 1
    everywhere = "0" if last == 0 else f"0-{last}"
    return layers[everywhere] if list(layers) == [everywhere] else {"layers": layers}


def mechanism_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters of all mechanisms."""
    prefixes = [name for name, module in model.named_modules() if isinstance(module, hf_rfattn.Mechanism)]
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{p}.") for p in prefixes)}


def make_optimizer(model: nn.Module, options: RunOptions) -> AdamW:
    """Create AdamW with weight decay for matrices only, except those of mechanisms, and --mechanism-learning-rate."""
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
    # fused: one pass over the weights per step instead of several, faster on a CPU if the vocabulary is large
    return AdamW([{"params": p, "lr": lr, "weight_decay": d, "peak": lr} for p, lr, d in groups if p], fused=True)


def rate_factor(step: int, steps: int, warmup: float, scheduler: str) -> float:
    """Return the learning rate at a step, counted from 0, as a fraction of its peak.

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
    """Return the maximum sequence length: --max-length, by default `usual` or the limit of the model, if that is lower.

    With --extend-positions, the position table and the limit of the tokenizer are extended to --max-length.
    """
    limit, wanted = hf_rfattn.longest_input(model), options.max_length
    if wanted is None:
        if options.extend_positions is not None:
            raise ValueError("--extend-positions needs --max-length, the length to extend the positions to.")
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
    """Converts rows to tensors, padded to the longest row. `others`: padding values of further columns.

    Padding is always on the right, whatever the padding side of the tokenizer: encoders classify by the first token,
    decoders by the last token before padding, and both count positions from the first column.
    """

    tokenizer: PreTrainedTokenizerBase
    others: dict[str, int] = field(default_factory=dict)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        padding = {"input_ids": self.tokenizer.pad_token_id or 0, "attention_mask": 0}  # any token: padding is masked
        padding |= {"token_type_ids": self.tokenizer.pad_token_type_id, **self.others}
        batch = {}
        for name in rows[0]:
            cells = [torch.as_tensor(row[name]) for row in rows]
            if name in padding:
                batch[name] = nn.utils.rnn.pad_sequence(cells, batch_first=True, padding_value=padding[name])
            elif name != "length":  # only for --group-by-length, not an input of models
                batch[name] = torch.stack(cells)
        return batch
