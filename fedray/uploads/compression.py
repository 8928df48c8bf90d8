"""The base class of steps that make uploads smaller."""

from __future__ import annotations

from collections.abc import Sequence

from fedray.core.upload import UploadStep
from fedray.errors import UserError


class Compression(UploadStep):
    """A step that makes uploads smaller. ``train.upload`` may have one of them, because the bytes of two together are
    not those of either."""

    def follows(self, before: Sequence[UploadStep]) -> None:
        for step in before:
            if isinstance(step, Compression):
                names = [type(each).__name__.lower() for each in (step, self)]
                raise UserError(f"train.upload: {' and '.join(names)} both make uploads smaller; give one of them")
