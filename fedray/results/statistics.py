"""Statistics of runs that differ only in their seeds: intervals, paired tests, and medians with targets not reached.

Everywhere in fedray ``mean ± margin`` is the 95 % confidence interval of the mean by Student's t. It assumes that the
runs are independent and that their results are approximately normally distributed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy.stats import t, ttest_rel

LEAST_RUNS = 3
"""The smallest number of runs for which an interval is shown. The interval of two runs is 12.7 times as wide as their
distance, so the two values say more."""


def mean_and_margin(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of ``values``, the results of independent runs, and half the width of the mean's 95 % confidence
    interval (Student's t): ``mean ± margin`` is the interval.

    The margin is NaN for fewer than three values (:data:`LEAST_RUNS`), because the interval of two values is too wide
    to be useful. Without any values the mean is NaN, too.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n < LEAST_RUNS:
        return mean, math.nan
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, margin_of(std, n)


def margin_of(std: float, n: int, level: float = 0.95) -> float:
    """Returns half the width of the confidence interval (Student's t) of the mean of ``n`` values. ``std`` is the
    sample standard deviation of these values, computed with n - 1, and ``level`` is the confidence level."""
    return float(t.ppf((1 + level) / 2, n - 1)) * std / math.sqrt(n)


def with_interval(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Returns the results of several runs as the text of a table's cell: ``mean ± margin``, such as ``91.20 ± 0.35``,
    or the values themselves if there are fewer than :data:`LEAST_RUNS` (3).

    The cell is empty if there are no values. ``digits`` is the number of digits after the point. With "+" as ``sign``,
    positive numbers are shown with a plus sign.
    """
    shown = f"{sign}.{digits}f"
    mean, margin = mean_and_margin(values)
    if math.isnan(margin):
        return ", ".join(f"{value:{shown}}" for value in values)
    return f"{mean:{shown}} ± {margin:.{digits}f}"


def paired_p_value(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the two-sided p-value of the paired t-test between a group's results, ``values``, and those of the
    ``baseline``. Results at the same position are a pair. Returns NaN for fewer than :data:`LEAST_RUNS` (3) pairs.

    If no pair differs, the test statistic would be 0/0. The p-value is then 1, because there is no evidence of a
    difference.
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
    """Corrects the p-values of several tests, and returns the corrected p-values in the same order. If all corrected
    values are compared with a level such as 0.05, the chance of any false positive among the tests stays below this
    level.

    Holm's step-down rule (S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 6, 1979):
    the i-th smallest of m p-values is multiplied by m - i + 1; then each is raised to the one before it if that is
    larger, and lowered to 1 if it is above 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def median_to_reach(amounts: Sequence[float]) -> float:
    """Returns the median of the ``amounts`` (rounds or bytes, say) that runs took to reach a target. An amount of
    ``math.inf`` means that a run did not reach the target.

    The median is infinite if at least half of the runs did not reach the target, and NaN if there are no runs.
    """
    return float(np.median(amounts)) if len(amounts) else math.nan
