"""Whole numbers from quotients and products of floats."""

from __future__ import annotations

import math


def whole(amount: float) -> int:
    """The whole number of units in ``amount``: its floor, where an error of rounding does not cost a unit.

    0.29 * 100 is 28.999999999999996 in floating point, and means 29.
    """
    return math.floor(amount + 1e-9)
