"""Rounds a quotient or product of floats down to a whole number."""

from __future__ import annotations

import math


def whole_units(amount: float) -> int:
    """Returns ``amount`` rounded down, after correcting a rounding error: 0.29 * 100 gives 29, not 28.

    In floating point 0.29 * 100 is 28.999999999999996.
    """
    return math.floor(amount + 1e-9)
