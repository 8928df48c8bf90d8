"""Uploads of a few numbers that are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows
from fedray.uploads.compression import Sparsification
from fedray.uploads.topk import check_k, count_of

SEED_BYTES = 8


class RandK(Sparsification):
    """Sends k of the d numbers of an upload, drawn for each client and round, times d / k, so that the mean over draws
    is the upload. ``k`` is their number, or a fraction of all. The server knows the places from the client's seed.

    Stich, Cordonnier, Jaggi: Sparsified SGD with Memory. NeurIPS 2018.
    """

    def __init__(self, k: float) -> None:
        check_k(k)
        self.k = k

    def count(self, numbers: int) -> int:
        return count_of(self.k, numbers)

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        numbers = rows.shape[1]
        count = self.count(numbers)
        sent = torch.zeros_like(rows)
        for number, (row, out) in enumerate(zip(rows, sent, strict=True)):
            chosen = (
                torch.empty(numbers)
                .uniform_(generator=upload.generator(number))
                .argsort(stable=True)[:count]
                .to(row.device)
            )
            out[chosen] = row[chosen] * (numbers / count)
        return sent

    def wire_bytes(self, numbers: int, before: float) -> float:
        """The numbers, and the seed by which their places are drawn."""
        return BYTES_PER_NUMBER * self.count(numbers) + SEED_BYTES
