"""Loading a model and its tokenizer for a task, and giving the model its attention."""

from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_rfattn
from hf_rfattn.integration import reading
from hf_rfattn.mechanisms import parse_attention

from .batches import PadBatch
from .options import RunOptions


def load_config(options: RunOptions, **changes: Any) -> PreTrainedConfig:
    """The model's config with what the task changes in it."""
    if options.model is None:
        raise ValueError("--model is missing: a model's folder, or its name on the Hub.")
    config = _read_config("--model", options.model, changes)
    return config if options.init is None else _converted_config(options, config, changes)


def _read_config(option: str, name: str, changes: dict[str, Any]) -> PreTrainedConfig:
    try:
        return reading.load_config(name, **changes)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _converted_config(options: RunOptions, base: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """That of --init, which must be the model of --model in all but its attention."""
    config = _read_config("--init", str(options.init), changes)
    if getattr(config, "rfattn", None) is None:
        raise ValueError(f"--init {options.init!r} is not a converted checkpoint: nothing in it is patched.")
    for name in ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        there, expected = getattr(config, name, None), getattr(base, name, None)
        if there != expected:
            raise ValueError(
                f"--init {options.init!r} is no conversion of --model: its {name} is {there}, not {expected}."
            )
    return config


def load_tokenizer(options: RunOptions) -> PreTrainedTokenizerBase:
    """A fast tokenizer with a padding token."""
    name = options.tokenizer or options.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name!r} has no tokenizer that can be read: {reading.first_paragraph(error)} Give --tokenizer."
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer of {name!r} has no fast version, which the recipes need.")
    return with_padding(tokenizer)


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """GPT-2 and its kin have no padding token; any other one will do, since padding is masked."""
    if tokenizer.pad_token is None:
        stand_in = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
        if stand_in is None:
            raise ValueError("The tokenizer has neither a padding token nor one that could stand in for it.")
        tokenizer.pad_token = stand_in
    return tokenizer


def load_model(
    auto_class: Any, options: RunOptions, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The model with a head for the task, in float32, ready to train."""
    name = options.init or options.model
    try:
        model = auto_class.from_pretrained(name, config=config, dtype=torch.float32, trust_remote_code=False)
    except OSError as error:
        raise ValueError(f"{name!r} cannot be read: {reading.first_paragraph(error)}") from error
    return ready_to_train(model, tokenizer)


def ready_to_train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Tell the model its padding token: the last token before it is what decoders classify by."""
    model.config.pad_token_id = tokenizer.pad_token_id
    there = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > there:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, the model only {there}; they do not belong together."
        )
    return model


def has_new_head(model: PreTrainedModel, options: RunOptions) -> bool:
    """Whether --model had no head for the task, so that it got one with random weights."""
    known = None if options.model is None else reading.load_config(options.model).architectures
    return type(model).__name__ not in (known or ())


def set_attention(model: PreTrainedModel, options: RunOptions) -> None:
    """Patch or unpatch as --attention says; without it the model stays as it is."""
    if options.attention is None:
        return
    if options.attention == "softmax":
        hf_rfattn.unpatch_model(model)
        return
    config = parse_attention(options.attention, options.attention_options)
    if options.redraw_every and getattr(config, "redraw_interval", None):
        raise ValueError("--redraw-every and the option redraw_interval both redraw; give one of them.")
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
    """Names of the parameters that mechanisms have brought along."""
    prefixes = [name for name, module in model.named_modules() if isinstance(module, hf_rfattn.Mechanism)]
    return {name for name, _ in model.named_parameters() if any(name.startswith(f"{p}.") for p in prefixes)}


def choose_length(model: PreTrainedModel, wanted: int | None, usual: int) -> int:
    """The length to cut at: what was asked for, which must fit, or what is usual for the task, as far as it fits."""
    limit = reading.longest_input(model)
    if wanted is None:
        return usual if limit is None else min(usual, limit)
    if limit is not None and wanted > limit:
        raise ValueError(
            f"--max-length {wanted} is more than the {limit} positions of this model. Choose at most {limit}, or give "
            f"the model more first: hf_rfattn.extend_positions(model, {wanted}), save_pretrained, then --model."
        )
    return wanted


def collator(tokenizer: PreTrainedTokenizerBase, **others: int) -> PadBatch:
    """Pads what the tokenizer gives; `others`: what fills further columns."""
    padding = {
        "input_ids": tokenizer.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": tokenizer.pad_token_type_id,
    }
    return PadBatch(padding | others)
