"""Uploads of signs alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows
from fedray.gradients.rows import by_rows
from fedray.uploads.compression import Compression
from fedray.uploads.topk import check_feedback


class Sign(Compression):
    """Sends the signs of an upload u, times the mean of its absolute values: C(u) = sign(u) mean |u|. The sign of 0 is
    +.

    With ``error_feedback`` a client keeps what it has not sent, e, and adds it the next time: it sends C(u + e), and
    then e <- u + e - C(u + e). Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes. ICML 2019, Algorithm 1.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        check_feedback(error_feedback)
        self.keeps = error_feedback

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        if upload.kept is not None:
            rows = rows + upload.kept
        size = by_rows(lambda row: row.abs().mean(dim=1, keepdim=True), rows)
        sent = torch.where(rows < 0, -size, size)
        if upload.kept is not None:
            upload.kept = rows - sent
        return sent

    def wire_bytes(self, numbers: int, before: float) -> float:
        """A bit for each of d ``numbers``, and the mean: d / 8 + 4 bytes."""
        return numbers / 8 + BYTES_PER_NUMBER
