"""What is done to the clients' uploads before they are weighted and summed: clipping, compression, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedray.core.seeds import Purpose, torch_seed


@dataclass
class UploadRows:
    """What a step may know of the rows that it gets. Of all lists, entry i is that of row i.

    ``name`` is the upload's name in the algorithm and ``phase`` the phase that uploads it. ``clients`` are the clients'
    numbers. ``kept`` float32 ``[C, parameters]`` is what the step kept of these clients at their last participation,
    zeros before the first; a step that ``keeps`` assigns what is to be kept from now on.
    """

    name: str
    phase: str
    round: int
    clients: Sequence[int]
    seed: int
    place: int
    kept: Tensor | None = None

    def generator(self, row: int) -> torch.Generator:
        """Returns a new random generator, on the CPU, of the client of ``row``.

        What it draws depends on ``run.seed``, the round, the client, the upload and the step alone. So the result does
        not depend on which clients are computed together.
        """
        drawn = torch_seed(self.seed, Purpose.UPLOAD, self.round, self.clients[row], self.place)
        return torch.Generator().manual_seed(drawn)


class UploadStep:
    """A step that every upload passes on the client's side, before it is weighted and summed (``train.upload``).

    Any function ``step(rows, upload)`` is a step as well; a class can also keep something of each client. Steps are
    called in the order in which the config names them, each with what the one before has returned. A step must treat
    each row by itself, draw random numbers from :meth:`UploadRows.generator` only, and depend on nothing else.
    :class:`fedray.testing.UploadContract` tests that.

    Example:
        class Clip(UploadStep):
            def __call__(self, rows, upload):
                return rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
    """

    keeps: ClassVar[bool] = False
    """Whether the step keeps a row of each client from one participation to the next (``upload.kept``), such as what
    was not sent. Algorithms of several phases can't have such steps."""

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        """Returns the rows that are sent.

        Args:
            rows: float32 ``[C, parameters]``, a row for each client: the update y_i - x of an uploaded model, where x
                is the model that the server sent, or an uploaded vector. Buffers, such as running statistics, are not
                among them, and are sent as they are. It is the step's own copy.
            upload: Whose rows these are.

        Returns:
            Rows of the same shape and type.
        """
        raise NotImplementedError
