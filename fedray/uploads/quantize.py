"""Uploads of few bits for each number."""

from __future__ import annotations

from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER
from fedray.uploads.compression import Rounding


class Quantize(Rounding):
    """Rounds the numbers of an upload at random, without bias, to one of the 2^b values that divide the range from its
    least to its greatest number evenly. ``bits`` is b, at most 16.

    Suresh, Yu, Kumar, McMahan: Distributed Mean Estimation with Limited Communication. ICML 2017, Section 2.2.
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= 16 or bits != int(bits):
            raise ValueError(f"bits must be a whole number from 1 to 16, not {bits}")
        self.bits = int(bits)

    def rounded(self, numbers: Tensor, drawn: Tensor) -> Tensor:
        least, greatest = numbers.aminmax()
        step = (greatest - least) / (2**self.bits - 1)
        if not step > 0:
            return numbers
        # the sum of a level and a number from 0 to 1 needs more digits than float32 has
        exact = (numbers - least).double() / step + drawn
        found: Tensor = least + exact.floor().clamp(max=2**self.bits - 1).float() * step
        return found

    def bytes_of(self, numbers: int) -> float:
        """The range's two ends, and b bits for each of d ``numbers``: d b / 8 + 8 bytes."""
        return numbers * self.bits / 8 + 2 * BYTES_PER_NUMBER
