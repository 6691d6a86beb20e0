"""How long `torch.compile` takes at each new input length: softmax and patched models, one program after another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor
from rich.table import Table
from transformers import BertConfig, BertModel

from ..integration import patch_model
from ..results import SOFTMAX, new_result, rounded
from .timing import threads

LAYERS = 3


@dataclass(frozen=True)
class Settings:
    lengths: Sequence[int] = (128, 256, 384, 512)
    attention: Sequence[str] = ("favor+",)
    backend: str = "inductor"
    threads: int | None = None
    seed: int = 0


@dataclass
class Row:
    """Seconds of the first call at each length, and how many programs they took."""

    attention: str
    seconds: list[float] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    graph_breaks: int = 0


def measure_compile_time(settings: Settings, advance: Callable[[float, str], Any] = lambda *_: None) -> dict[str, Any]:
    """First calls of a compiled encoder with random weights, without gradients, at lengths in the given order."""
    names = [SOFTMAX, *settings.attention]
    rows = []
    with threads(settings.threads), inductor.patch(force_disable_caches=True):  # not what an earlier run compiled
        result = new_result("bench compile", seed=settings.seed)
        for number, name in enumerate(names):
            rows.append(_measure(name, settings, advance, number / len(names)))
    result |= {"model": {"name": f"bert-shaped, {LAYERS} layers, random weights"}, "backend": settings.backend}
    return result | {"lengths": list(settings.lengths), "rows": [vars(row) for row in rows]}


@torch.no_grad()
def _measure(name: str, settings: Settings, advance: Callable[[float, str], Any], share: float) -> Row:
    torch.manual_seed(settings.seed)
    config = BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=max(settings.lengths))
    model = BertModel(config).eval()
    if name != SOFTMAX:
        patch_model(model, name)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled, row = torch.compile(model, backend=settings.backend), Row(name)
    for length in settings.lengths:
        advance(share, f"{name}, {length} tokens")
        ids = torch.randint(config.vocab_size, (2, length))
        start = time.perf_counter()
        compiled(input_ids=ids, attention_mask=torch.ones_like(ids))
        row.seconds.append(rounded(time.perf_counter() - start, 3))
        row.programs.append(counters["stats"]["unique_graphs"])
    row.graph_breaks = sum(counters["graph_break"].values())
    return row


def table(result: dict[str, Any]) -> Table:
    """Seconds by length, for the terminal."""
    found = Table(title=f"torch.compile, {result['model']['name']}: seconds of the first call at each length")
    for column in ("attention", *(f"{length:,}" for length in result["lengths"]), "programs", "graph breaks"):
        found.add_column(column, justify="left" if column == "attention" else "right")
    for row in result["rows"]:
        seconds = (f"{value:.1f}" for value in row["seconds"])
        found.add_row(row["attention"], *seconds, str(row["programs"][-1]), str(row["graph_breaks"]))
    return found
