"""Reading models from a folder or the Hub: configs, classes, and how long an input may be."""

from pathlib import Path
from typing import Any

import transformers

from .discovery import outermost_models
from .positions import learned_positions


def load_config(name: str, **changes: Any) -> Any:
    """The config of a model in a folder or on the Hub, with some fields changed."""
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"There is no folder {name!r}.")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **changes)
    except OSError as error:
        paragraph = " ".join(str(error).strip().partition("\n\n")[0].split())[:300]
        raise ValueError(f"{name!r} is not a model that can be read. {paragraph}") from error


def model_class(config: Any) -> Any:
    """The model class the checkpoint was saved from, or AutoModel."""
    found = [cls for name in config.architectures or () if (cls := named_model_class(name))]
    return found[0] if found else transformers.AutoModel


def named_model_class(name: str) -> Any:
    """The model class that transformers has under this name, and nothing else that it has; or None."""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def longest_input(model: Any) -> int | None:
    """How many tokens a model takes; None if its config names no limit.

    >>> from transformers import LlamaConfig, LlamaModel, RobertaConfig, RobertaModel
    >>> size = {"hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 66}
    >>> longest_input(RobertaModel(RobertaConfig(**size)))  # whose positions begin behind the padding token's
    64
    >>> longest_input(LlamaModel(LlamaConfig(**size, num_attention_heads=2, vocab_size=9)))
    66
    """
    config = outermost_models(model)[0].config.get_text_config()
    return learned_positions(model) or getattr(config, "max_position_embeddings", None)


def first_tokens(text: str, name: str, model: Any, most: int) -> Any:
    """A text as a batch of one, by the tokenizer of that name; cut at `most` tokens, or what the model takes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    limits = (tokenizer.model_max_length, longest_input(model), most)
    return tokenizer(text, return_tensors="pt", truncation=True, max_length=min(limit for limit in limits if limit))
