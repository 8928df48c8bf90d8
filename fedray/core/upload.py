"""What is done to the clients' uploads before they are weighted and summed: clipping, compression, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedray.core.seeds import Purpose, torch_seed

BYTES_PER_NUMBER = 4


@dataclass
class UploadRows:
    """Tells an upload step (:class:`UploadStep`) about the rows that it gets: one row for each of C clients.

    Args:
        name: the name under which the algorithm returns the upload, such as ``y``.
        phase: the name of the phase in which clients send it, such as ``train``. A phase is a part of a round: a
            broadcast, the clients' work, and an update at the server.
        round: the number of the round.
        clients: the clients' numbers; ``clients[i]`` is the client of row i.
        seed: ``run.seed``; only :meth:`generator` uses it.
        place: a number that differs between all pairs of a step and an upload of the round, so that each pair has its
            own random numbers; only :meth:`generator` uses it.
        kept: float32 ``[C, parameters]``, the rows that the step stored for these clients at their last participation,
            zeros before the first; None for a step that stores nothing. A step whose ``keeps`` is true assigns the rows
            that it stores from now on.
    """

    name: str
    phase: str
    round: int
    clients: Sequence[int]
    seed: int
    place: int
    kept: Tensor | None = None

    def generator(self, row: int) -> torch.Generator:
        """Returns a new torch generator on the CPU, from which an upload step draws the noise of the client in ``row``.

        The generator's numbers depend only on ``run.seed``, the round, the client, the upload and the step, and not on
        which clients are computed together.
        """
        drawn = torch_seed(self.seed, Purpose.UPLOAD, self.round, self.clients[row], self.place)
        return torch.Generator().manual_seed(drawn)


class UploadStep:
    """The base class of steps that change uploads on the client's side, before they are weighted and summed: clipping,
    compression or noise (``train.upload``).

    fedray calls ``step(rows, upload)`` with the rows of C clients, ``[C, parameters]``, and an :class:`UploadRows` that
    says whose rows they are. The step returns the rows that are sent instead. It may also be a plain function; only a
    class can store a row for each client (:attr:`keeps`). Steps are called in the order in which the configuration
    names them, and each gets the rows that the one before it has returned. A step must treat each row separately, draw
    random numbers only from :meth:`UploadRows.generator`, and depend on nothing else.
    :class:`fedray.testing.UploadContract` tests this.

    Example:
        class Clip(UploadStep):
            def __call__(self, rows, upload):
                return rows / rows.norm(dim=1, keepdim=True).clamp(min=1)
    """

    keeps: bool = False
    """Whether the step stores a row for each client from one participation to the next (``upload.kept``), such as the
    part of an update that was not sent. Algorithms with several phases can't use such steps."""

    def __call__(self, rows: Tensor, upload: UploadRows) -> Tensor:
        """Returns the rows that are sent in place of ``rows``. fedray calls it with the uploads of C clients, before
        they are weighted and summed.

        Args:
            rows: float32 ``[C, parameters]``, a row for each client: an uploaded vector, or the update y_i - x of an
                uploaded model, where x is the model that the server sent. Buffers, such as running statistics, are not
                included and are sent unchanged. The step may overwrite ``rows``.
            upload: says which upload and which clients the rows belong to.

        Returns:
            Rows of the same shape and type.
        """
        raise NotImplementedError

    def follows(self, before: Sequence[UploadStep]) -> None:
        """Is called once, before the run, with the steps before this one in ``train.upload``. Override it for a step
        that depends on them, or has to refuse what they are."""

    def wire_bytes(self, numbers: int, before: float) -> float:
        """Returns how many bytes a client sends for an upload of so many ``numbers`` after this step, for the column
        ``bytes_up``. ``before`` are those without it, which are the default."""
        return before
