"""Uploads of few bits for each number."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows
from fedray.uploads.compression import Compression


class Quantize(Compression):
    """Rounds the numbers of an upload at random, without bias, to one of the 2^b values that divide the range from its
    least to its greatest number evenly. ``bits`` is b, at most 16.

    Suresh, Yu, Kumar, McMahan: Distributed Mean Estimation with Limited Communication. ICML 2017, Section 2.2.
    """

    def __init__(self, bits: int) -> None:
        if not 1 <= bits <= 16 or bits != int(bits):
            raise ValueError(f"bits must be a whole number from 1 to 16, not {bits}")
        self.bits = int(bits)

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        for number, row in enumerate(rows):
            least, greatest = row.aminmax()
            step = (greatest - least) / (2**self.bits - 1)
            if step > 0:
                drawn = torch.empty(row.shape).uniform_(generator=upload.generator(number)).to(row.device)
                level = ((row - least) / step + drawn).floor().clamp(max=2**self.bits - 1)
                row.copy_(least + level * step)
        return rows

    def wire_bytes(self, numbers: int, before: float) -> float:
        """The range's two ends, and b bits for each of d ``numbers``: d b / 8 + 8 bytes."""
        return numbers * self.bits / 8 + 2 * BYTES_PER_NUMBER
