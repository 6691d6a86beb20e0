"""Shared code of all benchmarks: creates the result document and times attention on several paths.

A path is a way to run a mechanism: plain torch operations, the same compiled with `torch.compile`, or fused GPU kernels
(`ops.backend`). All paths and softmax are timed alternately in one race. A path that cannot be measured is left out,
and the reason is recorded. Times include kernel launches and end when the device has finished.
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
WARMUP = 1  # number of warm-up repetitions
PROGRAMS = 256  # recompile limit of torch.compile per function, which several models share
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Document = dict[str, Any]
Progress = Callable[[float, str], Any]


def no_progress(share: float, doing: str) -> None:
    """Ignore progress: `share` is the part of the work that is done, `doing` the current step."""


@contextmanager
def measuring(kind: str, settings: Settings) -> Iterator[Document]:
    """Yield a result document to fill, with the threads, seed and backend of the settings."""
    if settings.dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {settings.dtype!r}; choose one of {', '.join(DTYPES)}.")
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {settings.device!r} is not available. {error}") from error
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(threads(settings.threads))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(backend.using(backend.get_backend()))
        if COMPILED in settings.paths:
            import torch._inductor.config as inductor

            stack.enter_context(inductor.patch(force_disable_caches=True))  # measure compilation without caches
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=PROGRAMS))
        torch.manual_seed(settings.seed)
        result = new_result(kind, seed=settings.seed, device=settings.device)
        model = {"model": name_of(settings.model)} if hasattr(settings, "model") else {}
        result |= {"settings": asdict(settings) | model, "warmup": WARMUP, "cells": [], "left_out": []}
        yield result
    result |= {"load_average_end": load_average(), "wall_time_seconds": round(time.perf_counter() - started, 1)}


class Row(NamedTuple):
    """A competitor: an attention on a path, with its number of features if that is an option."""

    attention: str
    features: int | None = None
    path: str = TORCH


class Race(NamedTuple):
    """Competitors, their seconds per repetition and, if compiled, of the first call; and reasons for missing rows."""

    competitors: dict[Row, Competitor]
    seconds: dict[Row, list[float]]
    first: dict[Row, float]
    left_out: dict[Row, str]

    def times(self, row: Row) -> dict[str, Any]:
        """Times of a row for a cell of the result."""
        own, steps, softmax = self.seconds[row], self.competitors[row].steps, self.seconds.get(Row(SOFTMAX))
        found: dict[str, Any] = {"milliseconds": spread([1000 * s / steps for s in own])}
        found["speed_over_softmax"] = None if softmax is None else rounded(median_ratio(softmax, own))
        return found | ({"first_call_seconds": rounded(self.first[row])} if row in self.first else {})

    def step_bytes(self, row: Row, device: str) -> int | None:
        """Memory used by one more run, in bytes."""
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
    """Measure each round and add its cells to the result. A round is a length with other labels; `competitors(**round)`
    returns what to time, and `columns` further fields of a cell.
    """
    work = [labels["length"] * (labels["length"] + 4096) * (3 if labels.get("training") else 1) for labels in rounds]
    for number, labels in enumerate(rounds):
        doing = [name for name in ("causal", "training") if labels.get(name)] + [f"{labels['length']:,} tokens"]
        progress(sum(work[:number]) / sum(work), ", ".join(doing))
        if labels["length"] == rounds[0]["length"]:
            torch.compiler.reset()  # compiled code is reused for all lengths
        found = race(competitors(**labels), settings)
        for row in found.seconds:
            result["cells"].append(row._asdict() | labels | found.times(row) | columns(found, row))
        result["left_out"] += [{**row._asdict(), **labels, "reason": why} for row, why in found.left_out.items()]


def race(competitors: Mapping[Row, Competitor], settings: Settings) -> Race:
    """Time rows alternately, after a first call of each path that compiles or may be unavailable (on a GPU, of all
    rows, which may run out of memory).
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
    """Set the backend before each run, since competitors alternate."""

    def prepare() -> None:
        backend.set_backend(name)
        competitor.prepare()

    return Competitor(competitor.run, prepare, competitor.steps)


def _first_call(
    competitor: Competitor, path: str, device: torch.device, synchronise: Callable[[], Any]
) -> tuple[float, str | None]:
    """Return the seconds of the first call and the reason why the path cannot be measured, None if it can."""
    if path == FUSED and device.type not in backend.DEVICES:
        return 0.0, f"there are no fused kernels for the device {device.type!r}"
    backend.decisions.clear()
    start = time.perf_counter()
    try:
        competitor.prepare()
        competitor.run()
        synchronise()
    except Exception as error:  # compilers and drivers raise many kinds; other rows can still be measured
        return 0.0, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds, decisions = time.perf_counter() - start, backend.decisions
    if path != FUSED or None in decisions.values():
        return seconds, None
    problems = "; ".join(f"{operator}: {problem}" for operator, problem in decisions.items())
    return seconds, problems or "it calls no operator that has a fused kernel"
