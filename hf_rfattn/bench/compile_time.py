"""How long `torch.compile` takes at each new input length: softmax and patched models, one program after another."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from transformers import BertConfig, BertModel

from ..integration import patch_model
from ..results import SOFTMAX, Block, Table, new_result, rounded
from .loading import named_configs
from .settings import CompileSettings
from .timing import threads

LAYERS = 3
Progress = Callable[[float, str], Any]


def measure(settings: CompileSettings, progress: Progress = lambda share, doing: None) -> dict[str, Any]:
    """First calls of a compiled encoder with random weights, without gradients, at lengths in the given order."""
    names = [SOFTMAX, *named_configs(settings.attention or ["favor+"])]
    rows = []
    with threads(settings.threads), inductor.patch(force_disable_caches=True):  # not what an earlier run compiled
        result = new_result("bench compile", seed=settings.seed)
        for number, name in enumerate(names):
            rows.append(_measure(name, settings, progress, number / len(names)))
    result |= {"model": {"name": f"bert-shaped, {LAYERS} layers, random weights"}, "backend": settings.backend}
    return result | {"lengths": list(settings.lengths), "rows": rows}


@torch.no_grad()
def _measure(name: str, settings: CompileSettings, progress: Progress, share: float) -> dict[str, Any]:
    """Seconds of the first call at each length, and how many programs they took."""
    torch.manual_seed(settings.seed)
    config = BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=max(settings.lengths))
    model = BertModel(config).eval()
    if name != SOFTMAX:
        patch_model(model, name)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend=settings.backend)
    seconds, programs = [], []
    for length in settings.lengths:
        progress(share, f"{name}, {length} tokens")
        ids = torch.randint(config.vocab_size, (2, length))
        start = time.perf_counter()
        compiled(input_ids=ids, attention_mask=torch.ones_like(ids))
        seconds.append(rounded(time.perf_counter() - start, 3))
        programs.append(counters["stats"]["unique_graphs"])
    breaks = sum(counters["graph_break"].values())
    return {"attention": name, "seconds": seconds, "programs": programs, "graph_breaks": breaks}


def report(result: dict[str, Any], name: str) -> list[Block]:
    """Seconds of the first call at each length."""
    rows = [
        [row["attention"], *(f"{seconds:.1f}" for seconds in row["seconds"]), str(row["programs"][-1])]
        for row in result["rows"]
    ]
    headings = ["", *(f"{length:,} tokens" for length in result["lengths"]), "programs"]
    return [Table("", headings, rows, aligned=False)]
