"""Rounds a quotient or product of floats down to a whole number."""

from __future__ import annotations

import math


def whole_units(amount: float) -> int:
    """Rounds ``amount`` down to a whole number, ignoring rounding errors: 0.29 * 100, which is 28.999999999999996 in
    floating point, gives 29. It is used for quotients such as CPUs per process."""
    return math.floor(amount + 1e-9)
