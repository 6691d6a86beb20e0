"""Averages of few samples, and how far to trust them."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..results import rounded

Z = statistics.NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def student_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t (Cornish and Fisher's expansion; three digits from 3 degrees of freedom on).

    >>> round(student_quantile(9), 2)  # 2.262 in tables
    2.26
    """
    n, z = freedom, Z
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def ratio_interval(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Mean of the first over mean of the second, of paired positive samples; several pairs: their geometric mean.

    The interval is of the logarithm, by the delta method: errors spread by factors, and have no interval below zero.

    >>> ratio_interval([([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])])
    Interval(mean=0.5, low=0.5, high=0.5)
    """
    logs, influences = [], []
    for above, below in pairs:
        a, b = statistics.fmean(above), statistics.fmean(below)
        logs.append(math.log(a / b))
        influences.append([x / a - y / b for x, y in zip(above, below, strict=True)])
    mean, count = statistics.fmean(logs), len(pairs[0][0])
    half = 0.0
    if count > 1:
        spread = statistics.stdev(statistics.fmean(draw) for draw in zip(*influences, strict=True))
        half = student_quantile(count - 1) * spread / count**0.5
    return Interval(*(rounded(math.exp(x)) for x in (mean, mean - half, mean + half)))


def mean_interval(samples: Sequence[float]) -> Interval:
    """Mean of positive samples.

    >>> mean_interval([4.0]).mean
    4.0
    """
    return ratio_interval([(samples, [1.0] * len(samples))])


def effective_count(samples: Sequence[float]) -> float:
    """How many equal samples would make a mean as uncertain: near 1 if one of them rules it.

    >>> effective_count([1.0, 1.0, 1.0, 1.0]), round(effective_count([1000.0, 1.0, 1.0, 1.0]), 2)
    (4.0, 1.01)
    """
    return sum(samples) ** 2 / sum(sample**2 for sample in samples)
