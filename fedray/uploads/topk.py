"""Uploads of the largest numbers alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.core.rounding import whole_units_up
from fedray.core.upload import BYTES_PER_NUMBER, UploadRows
from fedray.uploads.compression import Sparsification


def count_of(k: float, numbers: int) -> int:
    """Returns how many of so many ``numbers`` a step keeps: ``k`` of them, or for k below 1 that fraction of them,
    rounded up."""
    return min(numbers, int(k) if k >= 1 else whole_units_up(k * numbers))


def check_k(k: float) -> None:
    """Raises :class:`ValueError` if ``k`` is neither a whole number nor a fraction. 1.0 counts as neither, because it
    could mean one number or all."""
    if isinstance(k, bool) or not 0 < k < math.inf or (k == 1.0 and isinstance(k, float)) or (k >= 1 and k != int(k)):
        hint = "; all is no step at all" if k == 1 else ""
        raise ValueError(f"k must be a whole number, or a fraction between 0 and 1, not {k}{hint}")


def check_feedback(error_feedback: bool) -> None:
    """Raises :class:`ValueError` if ``error_feedback`` is not true or false."""
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be true or false, not {error_feedback!r}")


class TopK(Sparsification):
    """Sends the k numbers of an upload u whose absolute values are largest, C(u), and zeros for the others. Of equal
    ones the first are sent. ``k`` is their number, or a fraction of all.

    With ``error_feedback`` a client keeps what it has not sent, e, and adds it the next time: it sends C(u + e), and
    then e <- u + e - C(u + e). Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. NeurIPS 2018.
    """

    def __init__(self, k: float, error_feedback: bool = True) -> None:
        check_k(k)
        check_feedback(error_feedback)
        self.k, self.keeps = k, error_feedback

    def count(self, numbers: int) -> int:
        return count_of(self.k, numbers)

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        if upload.kept is not None:
            rows = rows + upload.kept
        count = self.count(rows.shape[1])
        sent = torch.zeros_like(rows)
        for row, out in zip(rows, sent, strict=True):
            size = row.abs()
            least = size.topk(count).values[-1]
            chosen = size > least
            equal = (size == least).nonzero().flatten()[: count - int(chosen.sum())]
            chosen[equal] = True
            out[chosen] = row[chosen]
        if upload.kept is not None:
            upload.kept = rows - sent
        return sent

    def wire_bytes(self, numbers: int, before: float) -> float:
        """A number and its place: k (4 + ceil(log2(d) / 8)) bytes for d ``numbers``."""
        place = math.ceil(math.log2(max(numbers, 2)) / 8)
        return self.count(numbers) * (BYTES_PER_NUMBER + place)
