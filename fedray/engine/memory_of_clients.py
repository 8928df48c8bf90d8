"""Estimates and measures what the training of some clients of a run takes of a device's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedray.core.batches import Batch
from fedray.core.samples import Indices
from fedray.core.structure import map_leaves
from fedray.engine.clients import Clients
from fedray.engine.memory import Footprint, footprint, is_out_of_memory, too_large
from fedray.errors import UserError, first_line


def too_large_for(clients: Clients, ids: Sequence[int], error: BaseException) -> str:
    """Returns the message for a user whose stack of the clients ``ids`` did not fit into memory; ``error`` is the
    allocator's."""
    batch = clients.train.gather(_first_batch(clients, ids))[0]
    return too_large(clients.network, len(ids), batch, clients.state_width(), first_line(error))


def footprint_of(clients: Clients) -> Footprint:
    """Measures what this process takes of its GPU with a stack of the largest clients.

    Raises :class:`UserError` if even one such stack does not fit.
    """
    experiment = clients.experiment
    size = (experiment.chunk or 1) if experiment.vectorize else clients.lanes
    own = _first_batch(clients, [int(clients.data.sizes().argmax())])
    x, y = clients.train.gather(np.broadcast_to(own, (size, len(own))))
    try:
        return footprint(clients.network, Batch(x, y, 0), clients.state_width())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = too_large(
            clients.network, size, map_leaves(lambda each: each[0], x), clients.state_width(), first_line(error)
        )
        raise UserError(f"{found}, and engine.device=cpu does without a GPU") from None


def _first_batch(clients: Clients, ids: Sequence[int]) -> Indices:
    """Returns the samples in the largest mini-batch of the first of the clients ``ids``."""
    own = clients.data.client(ids[0])
    return own[: clients.experiment.training.batch_size or len(own)]
