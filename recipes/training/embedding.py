"""Embedding models: read as sentence-transformers describes them, and texts embedded by all processes together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from .loop import peak_memory
from .models import choose_length, load_tokenizer, read_config
from .options import CommonOptions

USUAL_LENGTH = 512  # of models that name no limit
NO_LIMIT = 10**6  # tokenizers without a limit have a larger one


def load_encoder(options: CommonOptions, pooling: str | None, normalize: bool, device: torch.device) -> Any:
    """A SentenceTransformer in float32: as its files say, or else as the options do (by default mean pooling)."""
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
        from sentence_transformers.util import is_sentence_transformer_model
    except ImportError as error:
        raise ValueError("This recipe needs sentence-transformers: pip install -U sentence-transformers.") from error
    name, weights = str(options.model), {"dtype": torch.float32}
    if is_sentence_transformer_model(name):
        if pooling is not None:
            raise ValueError(f"--pooling: {name} says in its own files how it pools; leave the option out.")
        encoder = SentenceTransformer(name, device=str(device), model_kwargs=weights)
    else:
        read_config("--model", name)
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
    """The transformers model of a SentenceTransformer, which must have one."""
    models = [module for module in encoder.modules() if isinstance(module, PreTrainedModel)]
    parts = {id(part) for part in models[0].modules()} if models else set()
    if not models or any(id(model) not in parts for model in models):
        raise ValueError("This SentenceTransformer holds no transformers model, or several; the recipe measures one.")
    return models[0]


def set_length(encoder: Any, options: CommonOptions) -> int:
    """Where texts are cut: what the options say, by default where the model does."""
    own = encoder.max_seq_length
    usual = own if own and own < NO_LIMIT else USUAL_LENGTH
    encoder.max_seq_length = length = choose_length(encoder, options, usual)
    return length


@dataclass
class Speed:
    """Of embedding texts, over all processes."""

    texts: int
    tokens: int
    seconds: float
    peak_memory_bytes: int

    def document(self) -> dict[str, Any]:
        """For result files; the time includes tokenization."""
        return {
            "samples_per_second": self.texts / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes or None,
            "encode_seconds": round(self.seconds, 3),
        }


def embed(
    encoder: Any, texts: Sequence[str], accelerator: Accelerator, *, batch_size: int, prefix: str | None = None
) -> tuple[Tensor, Speed]:
    """Embeddings of all texts on every process, each of which embeds its share."""
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
    found["peak"] = peak_memory(accelerator.device)
    parts = gather_object([found])
    filled = [part for part in parts if part["numbers"]]
    rows = torch.empty(len(texts), filled[0]["rows"].shape[1])
    for part in filled:
        rows[part["numbers"]] = part["rows"].float()
    speed = Speed(
        texts=len(texts),
        tokens=sum(part["tokens"] for part in parts),
        seconds=max(part["seconds"] for part in parts),
        peak_memory_bytes=max(part["peak"] for part in parts),
    )
    return rows, speed
