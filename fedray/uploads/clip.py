"""Clipping of uploads."""

from __future__ import annotations

import math

from torch import Tensor

from fedray.core.upload import UploadRows, UploadStep
from fedray.gradients.rows import squared_norms


class Clip(UploadStep):
    """Shortens an upload u to the length S at most: u <- u min(1, S / ||u||_2). ``norm`` is S."""

    def __init__(self, norm: float) -> None:
        if isinstance(norm, bool) or not 0 < norm < math.inf:
            raise ValueError(f"norm must be above 0, not {norm}")
        self.norm = norm

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        lengths = squared_norms(rows).sqrt()
        return rows.mul_((self.norm / lengths.clamp(min=self.norm)).float())
