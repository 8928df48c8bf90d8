"""Noise on uploads, as in local differential privacy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows, UploadStep
from fedray.errors import UserError
from fedray.uploads.clip import Clip


class Noise(UploadStep):
    """Adds N(0, (z S)^2) to each number of an upload, where S is the length to which a step ``clip`` before it has
    shortened the upload. ``multiplier`` is z. A step between the two may lengthen an upload again, as error feedback
    does; the noise is then less than z times its length.

    Dwork and Roth: The Algorithmic Foundations of Differential Privacy, 2014, Appendix A (the Gaussian mechanism).
    """

    def __init__(self, multiplier: float) -> None:
        if not multiplier >= 0:
            raise ValueError(f"multiplier must be at least 0, not {multiplier}")
        self.multiplier, self.norm = multiplier, 0.0

    def follows(self, before: Sequence[UploadStep]) -> None:
        clips = [step for step in before if isinstance(step, Clip)]
        if not clips:
            raise UserError(
                "train.upload: noise is a multiple of the length to which uploads are clipped: put a clip before it, "
                "as in [{clip: 1.0}, {noise: 1.0}]"
            )
        self.norm = clips[-1].norm

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        for number, row in enumerate(rows):
            noise = torch.empty(row.shape).normal_(generator=upload.generator(number))
            row.add_(noise.to(row.device), alpha=self.multiplier * self.norm)
        return rows

    def wire_bytes(self, numbers: int, before: float) -> float:
        # nothing of a sparse or rounded upload is left
        return BYTES_PER_NUMBER * numbers if self.multiplier else before
