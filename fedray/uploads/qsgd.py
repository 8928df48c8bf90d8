"""Uploads that are rounded to a few levels of their length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows
from fedray.gradients.rows import squared_norms
from fedray.uploads.compression import Compression


class QSGD(Compression):
    """Rounds the numbers of an upload u at random, without bias: sign(u) ||u||_2 xi, where xi is one of the two
    multiples of 1 / s next to |u| / ||u||_2. ``levels`` is s.

    Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.
    NeurIPS 2017, Section 3.1.
    """

    def __init__(self, levels: int) -> None:
        if levels < 1 or levels != int(levels):
            raise ValueError(f"levels must be a whole number of at least 1, not {levels}")
        self.levels = int(levels)

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        lengths = squared_norms(rows).sqrt().float()
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > 0:
                drawn = torch.empty(row.shape).uniform_(generator=upload.generator(number)).to(row.device)
                level = (row.abs() / length * self.levels + drawn).floor()
                row.copy_(row.sign() * (length * level / self.levels))
        return rows

    def wire_bytes(self, numbers: int, before: float) -> float:
        """The length, and for each of d ``numbers`` one of 2 s + 1 values: d ceil(log2(2 s + 1)) / 8 + 4 bytes."""
        return numbers * math.ceil(math.log2(2 * self.levels + 1)) / 8 + BYTES_PER_NUMBER
