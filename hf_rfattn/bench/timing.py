"""Timing competitors on a machine that is never quite calm: in turn, several times, and by medians."""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import psutil
import torch

from ..results import rounded

Name = TypeVar("Name", bound=Hashable)

FEWEST = 3  # repetitions of what takes too long for more


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Competitor:
    """Something to time: `run` is on the clock, `prepare`, right before it, is not."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing


def busy_seconds() -> float:
    """Processor time that all other processes (and the host, on a virtual machine) have taken so far."""
    times = psutil.cpu_times()._asdict()
    left_out = ("idle", "iowait", "guest", "guest_nice")  # guests are counted among the users
    return sum(spent for kind, spent in times.items() if kind not in left_out) - time.process_time()


class Watch:
    """Notices runs that other processes disturbed, and has them run again while patience lasts.

    A run is disturbed when others took more than a tenth of one processor meanwhile. `patience`: seconds, in all, to
    spend on waiting for a calm machine and on runs that are thrown away. Whether a run counts depends on what others
    did, never on how long it took.
    """

    def __init__(
        self,
        patience: float = 0,
        *,
        busy: Callable[[], float] = busy_seconds,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Any] = time.sleep,
    ):
        self.patience, self.busy, self.clock, self.sleep = patience, busy, clock, sleep
        self.runs = self.disturbed = self.thrown_away = 0

    def start(self) -> None:
        self._begun = self.clock(), self.busy()

    def _calm(self) -> bool:
        """Since `start`."""
        elapsed = self.clock() - self._begun[0]
        return self.busy() - self._begun[1] <= 0.1 * elapsed + 0.01  # processor times come in hundredths

    def again(self) -> bool:
        """Whether what ran since `start` was disturbed and shall run again; returns once the machine is calm."""
        calm = self._calm()
        if calm or self.patience <= 0:
            self.runs += 1
            self.disturbed += not calm
            return False
        self.thrown_away += 1
        self.patience -= self.clock() - self._begun[0]
        while self.patience > 0:
            self.start()
            self.sleep(0.5)
            self.patience -= 0.5
            if self._calm():
                break
        return True

    def to_dict(self) -> dict[str, int]:
        return {"runs": self.runs, "disturbed": self.disturbed, "thrown_away": self.thrown_away}


def interleave(
    competitors: Mapping[Name, Competitor],
    repetitions: int,
    *,
    warmup: int = 1,
    seed: int = 0,
    max_seconds: float | None = None,
    watch: Watch | None = None,
    synchronise: Callable[[], Any] = nothing,
    clock: Callable[[], float] = time.perf_counter,
    after_each: Callable[[Name], Any] = lambda name: None,
) -> dict[Name, list[float]]:
    """Seconds of each run of each competitor, `repetitions` of them.

    One repetition runs every competitor once, so that whatever slows the machine for a while slows all of them; each
    has its own order (drawn from `seed`), so that none always runs in the wake of the same other. The first `warmup`
    repetitions do not count. A competitor whose runs would take longer than `max_seconds` in all, going by its last
    warm-up, sits out every second repetition, or three of four, … (see `repetitions_apart`). `watch` may have a run
    repeated. `synchronise` waits for the device before the clock is read; `after_each` is told the name of what has
    just run.

    >>> seconds = interleave({"a": Competitor(nothing), "b": Competitor(lambda: sum(range(100)))}, repetitions=3)
    >>> len(seconds["a"]), len(seconds["b"])
    (3, 3)
    """
    seconds: dict[Name, list[float]] = {name: [] for name in competitors}
    names = list(competitors)
    apart = dict.fromkeys(names, 1)
    shuffle = random.Random(seed).shuffle
    for repetition in range(warmup + repetitions):
        shuffle(names)
        for name in names:
            if (repetition - warmup) % apart[name] and repetition >= warmup:
                continue
            again = True
            while again:
                competitors[name].prepare()
                synchronise()
                if watch is not None:
                    watch.start()
                start = clock()
                competitors[name].run()
                synchronise()
                elapsed = clock() - start
                again = watch is not None and repetition >= warmup and watch.again()
            if repetition >= warmup:
                seconds[name].append(elapsed)
            elif max_seconds is not None:
                apart[name] = repetitions_apart(elapsed, repetitions, max_seconds)
            after_each(name)
    return seconds


def repetitions_apart(seconds: float, repetitions: int, max_seconds: float) -> int:
    """Every how manieth repetition to run what takes so long: a power of two, so that of any two competitors the one
    that runs less often always runs beside the other, and small enough for `FEWEST` runs.

    >>> repetitions_apart(0.1, 12, 2.0), repetitions_apart(0.2, 12, 2.0), repetitions_apart(60, 12, 2.0)
    (1, 2, 4)
    """
    apart = 1
    while -(-repetitions // apart) * seconds > max_seconds and -(-repetitions // (2 * apart)) >= FEWEST:
        apart *= 2
    return apart


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float], digits: int = 4) -> "Spread":
        """Rounded to so many significant digits.

        >>> Spread.of([1, 2, 3, 4, 100])
        Spread(median=3.0, lower=2.0, upper=4.0, count=5)
        """
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        lower, median, upper = (rounded(value, digits) for value in quartiles)
        return cls(median, lower, upper, len(samples))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios within repetitions: steadier than the ratio of the medians.

    Where `interleave` ran one of them less often, only the repetitions with both count.

    >>> median_ratio([2, 20, 200], [1, 10, 40])
    2.0
    >>> median_ratio([2, 0, 20, 0, 200], [1, 10, 40])
    2.0
    """
    apart = 1
    while max(len(numerators[::apart]), len(denominators[::apart])) > min(len(numerators), len(denominators)):
        apart *= 2
    if len(numerators) > len(denominators):
        numerators = numerators[::apart]
    else:
        denominators = denominators[::apart]
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """So many threads for torch inside the block, or as many as it has now."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def synchroniser(device: torch.device) -> Callable[[], Any]:
    """What waits for the device: nothing to wait for on a CPU."""
    return torch.cuda.synchronize if device.type == "cuda" else nothing
