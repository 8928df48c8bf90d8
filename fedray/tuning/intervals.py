"""Statistics of runs that differ in their seed alone: intervals, paired differences, medians with unreached targets.

Everywhere in fedray ``mean ± margin`` is the 95 % confidence interval of the mean by Student's t. It supposes that the
runs are independent and that their results are about normally distributed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy.stats import t, ttest_rel

LEAST_RUNS = 3
"""Runs below which no interval is given: of two runs it is 12.7 times as wide as the distance between them, so that the
two values say more."""


def mean_and_margin(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean of independent runs, and half the width of its confidence interval (Student's t).

    The margin is NaN for fewer than :data:`LEAST_RUNS` values, and the mean too for none.
    """
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n < LEAST_RUNS:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, margin_of(deviation, n, level)


def margin_of(deviation: float, n: int, level: float = 0.95) -> float:
    """Half the width of the confidence interval of the mean of ``n`` values whose sample deviation (n - 1) is known."""
    return float(t.ppf((1 + level) / 2, n - 1)) * deviation / math.sqrt(n)


def with_interval(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """A cell of a table: ``mean ± margin`` of three values or more, else the values themselves; empty for none.

    ``sign``: "+" shows the sign of positive numbers too.
    """
    shown = f"{sign}.{digits}f"
    mean, margin = mean_and_margin(values)
    if math.isnan(margin):
        return ", ".join(f"{value:{shown}}" for value in values)
    return f"{mean:{shown}} ± {margin:.{digits}f}"


def paired_p_value(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The two-sided p-value of the paired t-test; NaN for fewer than :data:`LEAST_RUNS` pairs.

    It is 1 if no pair differs: there is no evidence of a difference, and the test's own statistic is 0/0.
    """
    if len(values) < LEAST_RUNS:
        return math.nan
    if all(a == b for a, b in zip(values, baseline, strict=True)):
        return 1.0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # scipy warns where all differences are nearly the same, and is right about the p-value
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ttest_rel(values, baseline).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, corrected such that the chance of any false alarm among them stays below the level.

    Holm's step-down rule (Scand. J. Stat. 6, 1979): the i-th smallest of m is multiplied by m - i + 1, and is at least
    what the one before it became, and at most 1.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def median_to_reach(amounts: Sequence[float]) -> float:
    """The median over all runs of what each took to reach a target; ``math.inf`` stands for a run that never did.

    It is infinite where so many runs did not reach the target that the median lies among them; NaN for no runs.
    """
    return float(np.median(amounts)) if len(amounts) else math.nan
