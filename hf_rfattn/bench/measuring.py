"""Shared code of the benchmarks: creates the result document, times attention on several paths and measures memory.

A path is a way to run a mechanism: plain torch operations, the same compiled with `torch.compile`, or fused GPU kernels
(`ops.backend`). All paths and softmax are timed alternately in one race. A path that cannot be measured is left out,
and the reason is recorded. Times include kernel launches and end when the device has finished.
"""

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..ops import backend
from ..results.documents import load_average, name_of, new_result, rounded
from ..results.schema import SOFTMAX
from .settings import PATHS, Settings

TORCH, COMPILED, FUSED = PATHS
BACKENDS = {TORCH: "torch", COMPILED: "torch", FUSED: "auto"}
WARMUP = 1  # number of warm-up repetitions
FEWEST = 2  # minimum number of repetitions of slow competitors
PROGRAMS = 256  # recompile limit of torch.compile per function, which several models share
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Document = dict[str, Any]
Progress = Callable[[float, str], Any]  # called with the share of the work that is done, and the current step
Name = TypeVar("Name", bound=Hashable)


@contextmanager
def measuring(kind: str, settings: Settings) -> Iterator[Document]:
    """Yield a result document to fill, with the threads, seed and backend of the settings."""
    if settings.dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {settings.dtype!r}; choose one of {', '.join(DTYPES)}.")
    check_device(settings.device)
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


def check_device(name: str) -> None:
    """Raise ValueError if torch cannot use a device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        choices = f"Choose cpu or {gpu.type}." if gpu else "Choose cpu: torch finds no GPU."
        raise ValueError(f"The device {name!r} is not available. {choices}") from error


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Context manager that sets the number of torch threads; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Competitor:
    """Something to time. `run` is timed, `prepare`, called before it, is not. `steps`: number of steps per run."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing
    steps: int = 1


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


def interleave(
    competitors: Mapping[Name, Competitor],
    repetitions: int,
    *,
    warmup: int = 1,
    seed: int = 0,
    max_seconds: float | None = None,
    synchronise: Callable[[], Any] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Time all competitors and return the seconds of each run.

    One repetition runs every competitor once, in random order, so that a temporary slowdown of the machine affects all
    of them. The first `warmup` repetitions are not counted. A competitor whose repetitions would take longer than
    `max_seconds`, judging by its last warm-up, takes part in the first repetitions only, at least `FEWEST`.
    `synchronise` waits for the device before the clock is read.

    >>> seconds = interleave({"a": Competitor(nothing), "b": Competitor(lambda: sum(range(100)))}, repetitions=3)
    >>> len(seconds["a"]), len(seconds["b"])
    (3, 3)
    """
    seconds: dict[Name, list[float]] = {name: [] for name in competitors}
    names = list(competitors)
    counts = dict.fromkeys(names, repetitions)
    shuffle = random.Random(seed).shuffle
    for repetition in range(-warmup, repetitions):
        shuffle(names)
        for name in names:
            if repetition >= counts[name]:
                continue
            competitors[name].prepare()
            synchronise()
            start = clock()
            competitors[name].run()
            synchronise()
            elapsed = clock() - start
            if repetition >= 0:
                seconds[name].append(elapsed)
            elif max_seconds is not None and elapsed > 0:
                counts[name] = min(repetitions, max(FEWEST, int(max_seconds / elapsed)))
    return seconds


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, rounded to four significant digits.

    >>> spread([1, 2, 3, 4, 100])
    {'median': 3.0, 'lower': 2.0, 'upper': 4.0, 'count': 5}
    """
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    lower, median, upper = map(rounded, quartiles)
    return {"median": median, "lower": lower, "upper": upper, "count": len(samples)}


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios within repetitions, which varies less than the ratio of the medians.

    Uses only the repetitions in which both took part.

    >>> median_ratio([2, 20, 200], [1, 10, 40, 1, 1])
    2.0
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=False))


def synchroniser(device: torch.device) -> Callable[[], Any]:
    """Return a function that waits for the device."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing


def bytes_around(run: Callable[[], object], device: torch.device) -> tuple[int, int] | None:
    """Return the bytes in use before a run and at its peak; None where unknown (on a CPU, other systems than Linux).

    On a CPU, these are resident sets of the process. `ru_maxrss` cannot be reset and is inherited from the parent.

    >>> around = bytes_around(lambda: torch.ones(2**22), torch.device("cpu"))
    >>> around is None or around[1] - around[0] > 2**23
    True
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return before, torch.cuda.max_memory_allocated(device)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    # Freed memory that the allocator keeps would hide what the run uses.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = resident_bytes("VmRSS")
    reset.write_text("5")  # resets the peak
    run()
    return before, resident_bytes("VmHWM")


def resident_bytes(name: str) -> int:
    """Size of the resident set of this process: VmRSS, now, or VmHWM, its peak. 0 on other systems than Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
