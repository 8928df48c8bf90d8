"""Statistics of runs that differ only in their seed: intervals, paired tests, medians with targets not reached.

Everywhere in fedray ``mean ± margin`` is the 95 % confidence interval of the mean by Student's t. It assumes that the
runs are independent and that their results are about normally distributed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy.stats import t, ttest_rel

LEAST_RUNS = 3
"""The number of runs below which no interval is shown. The interval of two runs is 12.7 times as wide as the distance
between them, so that the two values say more."""


def mean_and_margin(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Returns the mean of independent runs, and half the width of its confidence interval (Student's t).

    The margin is NaN for fewer than three values (:data:`LEAST_RUNS`), because the interval of two is too wide to say
    anything. Without any values the mean is NaN too. ``level`` is the confidence, from 0 to 1.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n < LEAST_RUNS:
        return mean, math.nan
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, margin_of(std, n, level)


def margin_of(std: float, n: int, level: float = 0.95) -> float:
    """Returns half the width of the confidence interval of the mean of ``n`` values, whose sample standard deviation
    (with n - 1) is ``std``."""
    return float(t.ppf((1 + level) / 2, n - 1)) * std / math.sqrt(n)


def with_interval(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Returns the cell of a table for some values: ``mean ± margin``, or the values if they are fewer than
    :data:`LEAST_RUNS`.

    The cell is empty if there are none. With "+" as ``sign``, positive numbers are shown with their sign too.
    """
    shown = f"{sign}.{digits}f"
    mean, margin = mean_and_margin(values)
    if math.isnan(margin):
        return ", ".join(f"{value:{shown}}" for value in values)
    return f"{mean:{shown}} ± {margin:.{digits}f}"


def paired_p_value(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the two-sided p-value of the paired t-test; NaN for fewer than :data:`LEAST_RUNS` pairs.

    It is 1 if no pair differs, since then there is no evidence of a difference; the statistic of the test would be 0/0.
    """
    if len(values) < LEAST_RUNS:
        return math.nan
    if all(a == b for a, b in zip(values, baseline, strict=True)):
        return 1.0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # scipy warns if all differences are nearly the same, but its p-value is right
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ttest_rel(values, baseline).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values of several tests such that the chance of any false alarm among them stays below the level.

    Holm's step-down rule (S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6, 1979):
    the i-th smallest of m p-values is multiplied by m - i + 1; then each is raised to the one before it if that is
    larger, and lowered to 1 if it is above 1. The corrected values are returned in the order of ``p_values``.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def median_to_reach(amounts: Sequence[float]) -> float:
    """Returns the median, over all runs, of what each took to reach a target; ``math.inf`` is a run that never did.

    The median is infinite if so many runs did not reach the target that it lies among them. It is NaN without runs.
    """
    return float(np.median(amounts)) if len(amounts) else math.nan
