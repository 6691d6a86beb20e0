"""Embedding models: read as sentence-transformers describes them, and texts embedded by all processes together."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from .loop import peak_memory
from .models import load_tokenizer, read_config
from .options import CommonOptions


def load_encoder(options: CommonOptions, pooling: str | None, normalize: bool, device: torch.device) -> Any:
    """A SentenceTransformer in float32: as its files say, or else as the options do (by default mean pooling)."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from sentence_transformers.util import is_sentence_transformer_model

    name, weights = str(options.model), {"dtype": torch.float32}
    read_config("--model", options.model)
    if is_sentence_transformer_model(name):
        if pooling is not None:
            raise ValueError(f"--pooling: {name} says in its own files how it pools; leave the option out.")
        encoder = SentenceTransformer(name, device=str(device), model_kwargs=weights)
    else:
        body = Transformer(name, model_kwargs=weights)
        parts = [body, Pooling(model_inside(body).config.hidden_size, pooling or "mean")]
        encoder = SentenceTransformer(
            modules=parts + ([Normalize()] if normalize else []),
            device=str(device),
            similarity_fn_name="cosine" if normalize else "dot",
        )
    if options.tokenizer is not None:
        encoder.tokenizer = load_tokenizer(options)
    return encoder.eval()


def model_inside(encoder: Any) -> PreTrainedModel:
    """The transformers model of a SentenceTransformer."""
    models = [module for module in encoder.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise ValueError("This SentenceTransformer holds no transformers model, which this recipe measures.")
    return models[0]


def embed(
    encoder: Any, texts: Sequence[str], accelerator: Accelerator, *, batch_size: int, prefix: str | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Embeddings of all texts on every process, each of which embeds its share; and the speed of all together.

    The time includes tokenization.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    numbers = list(range(rank, len(texts), processes))
    share = [texts[i] for i in numbers]
    settings = {"prompt": prefix, "batch_size": batch_size, "convert_to_tensor": True, "show_progress_bar": False}
    if share:
        encoder.encode(share[:batch_size], **settings)  # the first call is slower
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    own = encoder.encode(share, **settings).cpu() if share else None
    seconds = time.perf_counter() - start
    whole = [f"{prefix or ''}{text}" for text in share]
    encoded = encoder.tokenizer(whole, truncation=True, max_length=encoder.max_seq_length)["input_ids"] if share else []
    found = {"numbers": numbers, "rows": own, "seconds": seconds, "tokens": sum(map(len, encoded))}
    parts = gather_object([{**found, "peak": peak_memory(accelerator.device)}])
    filled = [part for part in parts if part["numbers"]]
    rows = torch.empty(len(texts), filled[0]["rows"].shape[1])
    for part in filled:
        rows[part["numbers"]] = part["rows"].float()
    seconds, tokens = max(part["seconds"] for part in parts), sum(part["tokens"] for part in parts)
    return rows, {
        "samples_per_second": len(texts) / seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": max(part["peak"] for part in parts) or None,
        "encode_seconds": round(seconds, 3),
        "tokens_per_text": round(tokens / len(texts), 1),
    }
