"""Uploads that are rounded to a few levels of their length."""

from __future__ import annotations

import math

from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER
from fedray.gradients.rows import squared_norms
from fedray.uploads.compression import Rounding


class QSGD(Rounding):
    """Rounds the numbers of an upload u at random, without bias: sign(u) ||u||_2 xi, where xi is one of the two
    multiples of 1 / s next to |u| / ||u||_2. ``levels`` is s.

    Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.
    NeurIPS 2017, Section 3.1.
    """

    def __init__(self, levels: int) -> None:
        if levels < 1 or levels != int(levels):
            raise ValueError(f"levels must be a whole number of at least 1, not {levels}")
        self.levels = int(levels)

    def rounded(self, numbers: Tensor, drawn: Tensor) -> Tensor:
        length = squared_norms(numbers[None])[0].sqrt().float()
        if not length > 0:
            return numbers
        # the sum of a level and a number from 0 to 1 needs more digits than float32 has
        exact = numbers.abs().double() / length * self.levels + drawn
        level = exact.floor().clamp(max=self.levels).float()
        return numbers.sign() * (length * level / self.levels)

    def bytes_of(self, numbers: int) -> float:
        """The length, and for each of d ``numbers`` one of 2 s + 1 values: d ceil(log2(2 s + 1)) / 8 + 4 bytes."""
        return numbers * math.ceil(math.log2(2 * self.levels + 1)) / 8 + BYTES_PER_NUMBER
