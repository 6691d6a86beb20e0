"""Reads models from a folder or the Hub: their config, class and longest input."""

from pathlib import Path
from typing import Any

import transformers

from .discovery import outermost_models
from .positions import learned_positions


def load_config(name: str, **changes: Any) -> Any:
    """Load the config of a model in a folder or on the Hub, with some fields changed."""
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"There is no folder {name!r}.")
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ValueError(f"The folder {name!r} contains no model: it has no config.json.")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **changes)
    except OSError as error:
        paragraph = " ".join(str(error).strip().partition("\n\n")[0].split())[:300]
        raise ValueError(f"The model {name!r} cannot be loaded. {paragraph}") from error


def model_class(config: Any) -> Any:
    """Return the model class that the checkpoint was saved from, or AutoModel."""
    found = [cls for name in config.architectures or () if (cls := named_model_class(name))]
    return found[0] if found else transformers.AutoModel


def named_model_class(name: str) -> Any:
    """Return the model class of this name in transformers; None if there is none, or if it is not a model class."""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def longest_input(model: Any) -> int | None:
    """Return the maximum sequence length of a model, or None if its config has no limit.

    >>> from transformers import LlamaConfig, LlamaModel, RobertaConfig, RobertaModel
    >>> size = {"hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 66}
    >>> longest_input(RobertaModel(RobertaConfig(**size)))  # two positions are reserved for padding
    64
    >>> longest_input(LlamaModel(LlamaConfig(**size, num_attention_heads=2, vocab_size=9)))
    66
    """
    config = outermost_models(model)[0].config.get_text_config()
    return learned_positions(model) or getattr(config, "max_position_embeddings", None)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model. Raises ValueError if it has none, for which transformers may create one that knows
    special tokens only.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(f"{name} has no tokenizer, which is needed to read text. Save one in its folder.")
    return tokenizer


def first_tokens(text: str, name: str, model: Any, most: int) -> Any:
    """Encode a text as a batch of one with the tokenizer `name`, truncated to `most` tokens or the model's limit."""
    tokenizer = load_tokenizer(name)
    limits = (tokenizer.model_max_length, longest_input(model), most)
    return tokenizer(text, return_tensors="pt", truncation=True, max_length=min(limit for limit in limits if limit))
