"""Finds the whole number that a quotient or product of floats stands for."""

from __future__ import annotations

import math


def whole(amount: float) -> int:
    """Returns the whole number of units in ``amount``: its floor, unless that loses a unit to a rounding error.

    0.29 * 100 is 28.999999999999996 in floating point, and stands for 29.
    """
    return math.floor(amount + 1e-9)
