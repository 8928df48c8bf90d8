"""Finds the whole number that a quotient or product of floats stands for."""

from __future__ import annotations

import math


def whole_units(amount: float) -> int:
    """Returns ``amount`` rounded down, but not below a whole number from which only a rounding error separates it.

    0.29 * 100 is 28.999999999999996 in floating point, and gives 29.
    """
    return math.floor(amount + 1e-9)
