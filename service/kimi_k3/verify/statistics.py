# SPDX-License-Identifier: Apache-2.0
"""How sure a measured number is. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

Z95 = 1.959964
"""Standard deviations to either side that hold 95 % of a normal distribution."""

RESAMPLES = 2000


def share_error(right: int, count: int) -> float:
    """Standard error of a share, by the normal approximation; 0 at the ends, where it says nothing."""
    share = right / count
    return math.sqrt(share * (1 - share) / count)


def wilson(right: int, count: int, z: float = Z95) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's formula (1927), which holds near 0 and 1, too."""
    share, shrink = right / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # At the ends exactly so, which rounding would miss.
    return middle - half if right else 0.0, middle + half if right < count else 1.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; of one value the error is unknown."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def bootstrap(
    statistic: Callable[[Sequence[int]], float], count: int, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 % interval of a statistic of ``count`` questions, by drawing them again with replacement.

    Whatever belongs to one question is drawn together, so a difference of two models over the same questions
    is paired (Efron and Tibshirani, 1993; percentile interval).

    Args:
        statistic: of the numbers of the questions that were drawn.
    """
    chance = random.Random(seed)
    drawn = sorted(
        value
        for _ in range(resamples)
        if math.isfinite(value := statistic(chance.choices(range(count), k=count)))
    )
    if not drawn:
        return math.nan, math.nan
    return drawn[int(0.025 * len(drawn))], drawn[min(len(drawn) - 1, int(0.975 * len(drawn)))]
