"""Times competitors alternately, several times, and compares medians."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ..results import rounded

Name = TypeVar("Name", bound=Hashable)
FEWEST = 2  # minimum number of repetitions of slow competitors


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Competitor:
    """Something to time. `run` is timed, `prepare`, called before it, is not. `steps`: number of steps per run."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing
    steps: int = 1


def interleave(
    competitors: Mapping[Name, Competitor],
    repetitions: int,
    *,
    warmup: int = 1,
    seed: int = 0,
    max_seconds: float | None = None,
    synchronise: Callable[[], Any] = nothing,
    clock: Callable[[], float] = time.perf_counter,
    after_each: Callable[[Name], Any] = lambda name: None,
) -> dict[Name, list[float]]:
    """Time all competitors and return the seconds of each run.

    One repetition runs every competitor once, in random order, so that a temporary slowdown of the machine affects all
    of them. The first `warmup` repetitions are not counted. A competitor whose repetitions would take longer than
    `max_seconds`, judging by its last warm-up, takes part in the first repetitions only, at least `FEWEST`.
    `synchronise` waits for the device before the clock is read; `after_each` is called with the name after each run.

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
            after_each(name)
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


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Context manager that sets the number of torch threads; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def synchroniser(device: torch.device) -> Callable[[], Any]:
    """Return a function that waits for the device."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing
