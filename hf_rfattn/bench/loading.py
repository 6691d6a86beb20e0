"""Loads models for benchmarks, random or pretrained: softmax and patched copies that share their weights."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import patch_model, unpatch_model
from ..integration.cost import is_causal
from ..integration.discovery import find_attention
from ..integration.positions import learned_positions
from ..integration.reading import load_config, model_class
from ..mechanisms import MechanismConfig, resolve_config
from ..results.documents import name_of
from ..results.schema import SOFTMAX
from .measuring import DTYPES

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "attn_dropout")


SHAPES: dict[str, Callable[[int], PreTrainedModel]] = {  # shaped like bert-base and gpt2, with `length` positions
    "bert": lambda length: transformers.BertForSequenceClassification(
        transformers.BertConfig(max_position_embeddings=length, attention_probs_dropout_prob=0.0)
    ),
    "gpt2": lambda length: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=length, attn_pdrop=0.0)),
}


def load_model(name: str, length: int, *, dtype: str, device: str, kind: Any = None) -> PreTrainedModel:
    """Load one of `SHAPES`, a folder or a model on the Hub, with softmax (sdpa) and without attention dropout.

    `length`: of the longest input. `kind`: the class to load, by default the one it was saved from.
    """
    if name in SHAPES:
        model = SHAPES[name](length)
    else:
        config = load_config(name)
        for part in (config, config.get_text_config()):
            for option in DROPOUTS:
                if hasattr(part, option):
                    setattr(part, option, 0.0)
        loaded = (kind or model_class(config)).from_pretrained(name, config=config, trust_remote_code=False)
        model = unpatch_model(loaded)
    positions = learned_positions(model)
    if positions is not None and length > positions:
        raise ValueError(
            f"This {model.config.model_type} model has {positions} positions, too few for {length:,} tokens; choose "
            "shorter inputs."
        )
    model.set_attn_implementation("sdpa")
    nn.Module.to(model, device=device, dtype=DTYPES[dtype])
    return model.eval()


def check_decoder(model: PreTrainedModel, given: str) -> None:
    """Raise ValueError for an encoder, loaded as `given`. transformers gives it a language modelling head, under which
    every token sees those to predict.
    """
    if getattr(model.config, "is_decoder", None) is False and not any(map(is_causal, find_attention(model))):
        raise ValueError(f"{given} is an encoder ({model.config.model_type}), and cannot generate. Choose a decoder.")


def share_weights(model: PreTrainedModel, mechanisms: Mapping[str, Any], seed: int) -> dict[str, PreTrainedModel]:
    """Return the model and a patched copy for each mechanism, all of which share the same weight tensors.

    `mechanisms`: arguments of `patch_model` by name.
    """
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    models = {SOFTMAX: model}
    for name, config in mechanisms.items():
        models[name] = patch_quietly(copy.deepcopy(model, dict(weights)), config, seed).eval()
    return models


def patch_quietly(model: PreTrainedModel, attention: Any, seed: int = 0) -> PreTrainedModel:
    """`patch_model` without its warnings about layers that stay softmax and mechanisms that need training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return patch_model(model, attention, seed=seed)


def describe(model: PreTrainedModel, given: str, dtype: str) -> dict[str, Any]:
    """Describe, for a result document, a model that was loaded as `given`."""
    sites = [site for site in find_attention(model) if not site.cross]
    return {
        "name": f"{given}-shaped, random weights" if given in SHAPES else name_of(given),
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": dtype,
        "layers": len(sites),
        "heads": sites[0].num_heads,
        "kv_heads": sites[0].num_kv_heads,
        "head_dim": sites[0].head_dim,
    }


def named_configs(names: Iterable[str]) -> dict[str, MechanismConfig]:
    """Configs of mechanisms by name, each once. An alias without options of its own is replaced by the main name.

    >>> list(named_configs(["performer", "favor+", "linear", "elu-"]))
    ['favor+', 'linear', 'elu-']
    """
    found = {}
    for name in names:
        config = resolve_config(name)
        found[config.name if config == resolve_config(config.name) else name] = config
    return found


def random_tokens(model: PreTrainedModel, batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens with a mask of ones, as a tokenizer returns it without padding."""
    generator = torch.Generator(model.device).manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (batch, length), generator=generator, device=model.device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
