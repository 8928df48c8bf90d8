"""Means over seeds, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import t


def mean_and_margin(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean of independent runs, and half the width of its confidence interval (Student's t); NaN for one run."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(t.ppf((1 + level) / 2, n - 1)) * deviation / math.sqrt(n)
