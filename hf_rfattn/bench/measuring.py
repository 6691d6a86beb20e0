"""What all benchmarks do: begin and end a result document, and time attention on several paths in turn.

A path is a way to run the same mechanism: plain torch operations, the same compiled by `torch.compile`, or the fused
kernels of a GPU (`ops.backend`). All of them, and softmax, take turns in one race. A path that cannot be measured is
left out with its reason. Times include the launch of kernels and end when the device has finished.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from ..ops import backend
from ..results import SOFTMAX, load_average, name_of, new_result, rounded
from .memory import bytes_around
from .settings import PATHS, Settings
from .timing import Competitor, interleave, median_ratio, spread, synchroniser, threads

TORCH, COMPILED, FUSED = PATHS
BACKENDS = {TORCH: "torch", COMPILED: "torch", FUSED: "auto"}
WARMUP = 1  # repetitions
PROGRAMS = 256  # that torch.compile may make of one function: several models share it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Document = dict[str, Any]
Progress = Callable[[float, str], Any]


def no_progress(share: float, doing: str) -> None:
    """Tells nobody the share of the work that is done and what is being done."""


@contextmanager
def measuring(kind: str, settings: Settings) -> Iterator[Document]:
    """A result document, to be filled inside the block, where threads, seed and backend are those of the settings."""
    if settings.dtype not in DTYPES:
        raise ValueError(f"dtype {settings.dtype!r} is not possible; choose one of {', '.join(DTYPES)}.")
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {settings.device!r} is not possible here. {error}") from error
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(threads(settings.threads))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(backend.using(backend.get_backend()))
        if COMPILED in settings.paths:
            import torch._inductor.config as inductor

            stack.enter_context(inductor.patch(force_disable_caches=True))  # not what an earlier run compiled
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=PROGRAMS))
        torch.manual_seed(settings.seed)
        result = new_result(kind, seed=settings.seed, device=settings.device)
        model = {"model": name_of(settings.model)} if hasattr(settings, "model") else {}
        result |= {"settings": asdict(settings) | model, "warmup": WARMUP, "cells": [], "left_out": []}
        yield result
    result |= {"load_average_end": load_average(), "wall_time_seconds": round(time.perf_counter() - started, 1)}


class Row(NamedTuple):
    """What competes: an attention, with so many features if that can be chosen, on a path."""

    attention: str
    features: int | None = None
    path: str = TORCH


class Race(NamedTuple):
    """What ran, its seconds by repetition, those of first calls that compile, and why rows were left out."""

    competitors: dict[Row, Competitor]
    seconds: dict[Row, list[float]]
    first: dict[Row, float]
    left_out: dict[Row, str]

    def times(self, row: Row) -> dict[str, Any]:
        """What a cell of a result says of a row."""
        own, steps, softmax = self.seconds[row], self.competitors[row].steps, self.seconds.get(Row(SOFTMAX))
        found: dict[str, Any] = {"milliseconds": spread([1000 * s / steps for s in own])}
        found["speed_over_softmax"] = None if softmax is None else rounded(median_ratio(softmax, own))
        return found | ({"first_call_seconds": rounded(self.first[row])} if row in self.first else {})

    def step_bytes(self, row: Row, device: str) -> int | None:
        """Memory that one more run takes."""
        self.competitors[row].prepare()
        around = bytes_around(self.competitors[row].run, torch.device(device))
        return None if around is None else around[1] - around[0]


def measure_rounds(
    result: Document,
    settings: Settings,
    rounds: Sequence[dict[str, Any]],
    competitors: Callable[..., Mapping[Row, Competitor]],
    columns: Callable[[Race, Row], dict[str, Any]],
    progress: Progress,
) -> None:
    """Add the cells of each round. A round is a length and other labels, for which `competitors` gives what to time;
    `columns`: what else a cell has.
    """
    work = [labels["length"] * (labels["length"] + 4096) * (3 if labels.get("training") else 1) for labels in rounds]
    for number, labels in enumerate(rounds):
        doing = [name for name in ("causal", "training") if labels.get(name)] + [f"{labels['length']:,} tokens"]
        progress(sum(work[:number]) / sum(work), ", ".join(doing))
        if labels["length"] == rounds[0]["length"]:
            torch.compiler.reset()  # programs serve all lengths
        found = race(competitors(**labels), settings)
        for row in found.seconds:
            result["cells"].append(row._asdict() | labels | found.times(row) | columns(found, row))
        result["left_out"] += [{**row._asdict(), **labels, "reason": why} for row, why in found.left_out.items()]


def race(competitors: Mapping[Row, Competitor], settings: Settings) -> Race:
    """Time rows in turn, after a first call of each path that compiles or may not exist here; on a GPU of all rows,
    which may not fit in its memory.
    """
    device, chosen = torch.device(settings.device), {}
    first: dict[Row, float] = {}
    left_out: dict[Row, str] = {}
    synchronise = synchroniser(device)
    for row, competitor in competitors.items():
        chosen[row] = _with_backend(competitor, BACKENDS[row.path])
        if row.path != TORCH or device.type != "cpu":
            seconds, reason = _first_call(chosen[row], row.path, device, synchronise)
            if reason is not None:
                left_out[row] = reason
                del chosen[row]
            elif row.path != TORCH:
                first[row] = seconds
    options: dict[str, Any] = {"warmup": WARMUP, "seed": settings.seed, "max_seconds": settings.max_seconds}
    times = interleave(chosen, settings.repetitions, **options, synchronise=synchronise)
    return Race(chosen, times, first, left_out)


def _with_backend(competitor: Competitor, name: str) -> Competitor:
    """The switch is set before each run: competitors take turns."""

    def prepare() -> None:
        backend.set_backend(name)
        competitor.prepare()

    return Competitor(competitor.run, prepare, competitor.steps)


def _first_call(
    competitor: Competitor, path: str, device: torch.device, synchronise: Callable[[], Any]
) -> tuple[float, str | None]:
    """Its seconds, and why the path cannot be measured; None if it can."""
    if path == FUSED and device.type not in backend.DEVICES:
        return 0.0, f"there are no fused kernels for the device {device.type!r}"
    backend.decisions.clear()
    start = time.perf_counter()
    try:
        competitor.prepare()
        competitor.run()
        synchronise()
    except Exception as error:  # whatever a compiler or a driver may raise: other rows can still be measured
        return 0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds, decisions = time.perf_counter() - start, backend.decisions
    if path != FUSED or None in decisions.values():
        return seconds, None
    problems = "; ".join(f"{operator}: {problem}" for operator, problem in decisions.items())
    return seconds, problems or "it calls no operator that has a fused kernel"
