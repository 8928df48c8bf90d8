"""Rounds a quotient or product of floats to a whole number, as if it were exact."""

from __future__ import annotations

import math


def whole_units(amount: float) -> int:
    """Rounds ``amount`` down to a whole number, ignoring rounding errors: 0.29 * 100, which is 28.999999999999996 in
    floating point, gives 29. It is used for quotients such as CPUs per process."""
    return math.floor(amount + 1e-9)


def whole_units_up(amount: float) -> int:
    """Rounds ``amount`` up to a whole number, ignoring rounding errors: 0.07 * 100, which is 7.000000000000001 in
    floating point, gives 7. It is used for fractions of numbers that may be large, such as those of a model, so that
    what it ignores grows with the amount."""
    return math.ceil(amount * (1 - 1e-15))
