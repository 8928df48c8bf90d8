"""The base classes of steps that make uploads smaller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedray.core.upload import BYTES_PER_NUMBER, UploadRows, UploadStep
from fedray.errors import UserError


class Compression(UploadStep):
    """A step that makes uploads smaller. ``train.upload`` may have one of them, because the bytes of two together are
    not those of either; the exception is a :class:`Rounding` right after a :class:`Sparsification`."""

    def follows(self, before: Sequence[UploadStep]) -> None:
        for step in before:
            if isinstance(step, Compression):
                names = [type(each).__name__.lower() for each in (step, self)]
                raise UserError(
                    f"train.upload: {' and '.join(names)} both make uploads smaller; give one of them, or qsgd or "
                    "quantize right after topk or randk"
                )


class Sparsification(Compression):
    """A step that sends some numbers of an upload, and zeros for the others."""

    def count(self, numbers: int) -> int:
        """Returns how many of so many ``numbers`` are sent."""
        raise NotImplementedError


class Rounding(Compression):
    """A step that rounds the numbers of an upload at random, without bias.

    Right after a :class:`Sparsification` it rounds only what this one sends, that is, the numbers other than zero. The
    sparsification keeps what it leaves out itself, if it has error feedback; the error of rounding is 0 in the mean,
    and is not kept. (D. Basu, D. Data, C. Karakus, S. Diggavi: Qsparse-local-SGD. NeurIPS 2019, keep both.)
    """

    after: Sparsification | None = None
    """The sparsification before this step, if there is one."""

    def follows(self, before: Sequence[UploadStep]) -> None:
        if before and isinstance(before[-1], Sparsification):
            self.after = before[-1]
            before = before[:-1]
        super().follows(before)

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        for number, row in enumerate(rows):
            sent = slice(None) if self.after is None else row != 0
            if size := len(row[sent]):
                drawn = torch.empty(size).uniform_(generator=upload.generator(number)).to(row.device)
                row[sent] = self.rounded(row[sent], drawn)
        return rows

    def rounded(self, numbers: Tensor, drawn: Tensor) -> Tensor:
        """Returns ``numbers [d]``, each rounded to one of the two values next to it: up where the fraction by which it
        is above the lower one and ``drawn``, a uniform random number in [0, 1) for each, ``[d]``, are 1 together."""
        raise NotImplementedError

    def bytes_of(self, numbers: int) -> float:
        """Returns how many bytes so many rounded ``numbers`` need."""
        raise NotImplementedError

    def wire_bytes(self, numbers: int, before: float) -> float:
        """Those of the numbers that are sent, and of their places, or the seed from which these are drawn."""
        if self.after is None:
            return self.bytes_of(numbers)
        count = self.after.count(numbers)
        return before - BYTES_PER_NUMBER * count + self.bytes_of(count)
