"""Compares a cohort with all clients: what a round would be if everybody took part (``run.diagnostics=all_clients``).

All clients make the round's local steps from the model and with the broadcast that the cohort gets. Only the mean of
their updates is taken; no client keeps anything of it, and the run goes on from the cohort alone.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedray.engine.cohorts import cohort_of
from fedray.engine.dealing import Dealer
from fedray.engine.phase_tasks import Sent, task_of
from fedray.engine.state.run import RunState
from fedray.engine.sums import CohortSums
from fedray.engine.task_queue import TaskQueue
from fedray.experiment.experiment import Experiment
from fedray.tracking.diagnostics import UPDATE, Measured

HISTORY = "mean updates of all clients"
"""The server's vector with its updates of the last rounds as they would be with all clients, the oldest first, float32
``[at most tau, width]``."""


def update_of_all(state: RunState, experiment: Experiment, queue: TaskQueue) -> Tensor:
    """Returns the mean local update of all clients in the round that begins, by their aggregation weights, ``[width]``.

    It costs the local training of all clients.
    """
    algorithm, number = experiment.algorithm, state.server.round
    everybody = copy.copy(state)
    ids = np.flatnonzero(state.sizes)
    everybody.server = replace(state.server, cohort=cohort_of(ids, state, experiment, number))
    phase = algorithm.phases[0]
    broadcast = algorithm.broadcast(everybody.server, phase)
    sent = [Sent(queue.pool.publish(broadcast.shared), broadcast.scalars)]
    dealer = Dealer(queue.pool, experiment.training, experiment.chunk, state.layout.row_width, experiment.lanes)
    cut = dealer.cut(everybody.server.cohort)
    tasks = [replace(task_of(each, dealer.work_of(each), sent, everybody, experiment), keeps=False) for each in cut]
    sums = CohortSums(algorithm, phase, len(ids), state.layout, state.device)
    for task, found in queue.run(tasks):
        sums.add(task, found)
        queue.pool.drop(found.states)
    return torch.as_tensor(sums.totals()[UPDATE])


def momentum_error(state: RunState, window: int) -> float | None:
    """Returns how far the momentum of the round that begins is from that of full participation, over its length.

    The momentum is the mean of the server's updates in the last ``window`` rounds, (x^r - x^{r-tau}) / tau; that of
    full participation is the mean of the updates that the server would have made with all clients, from the same
    models. It is None until there are so many rounds.
    """
    server = state.server
    if server.round <= window:
        return None
    own = (server["x"] - server.model_of(server.round - window)) / window
    return relative(own, server[HISTORY].mean(0))


def remember(state: RunState, update: Tensor, window: int) -> None:
    """Adds the ``update`` that the server would have made with all clients to the last ``window`` of them."""
    known = state.server.vectors.get(HISTORY)
    rows = update[None] if known is None else torch.cat([torch.as_tensor(known), update[None]])
    state.server[HISTORY] = rows[-window:].contiguous()


def relative(found: Tensor, wanted: Tensor) -> float:
    """Returns the length of the difference over the length of what is ``wanted``."""
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


class FullParticipation:
    """The comparison of one round. It is made before the round, and :meth:`errors` is called after it."""

    def __init__(self, state: RunState, experiment: Experiment, queue: TaskQueue) -> None:
        assert isinstance(experiment.algorithm, Measured)
        self.algorithm = experiment.algorithm
        window = self.algorithm.momentum_window
        self._momentum = momentum_error(state, window) if window else None
        self._update = update_of_all(state, experiment, queue)
        if window:
            # the server's rule makes so much of a mean update
            remember(state, state.server.server_lr * self._update, window)

    def errors(self) -> dict[str, float]:
        """Returns the columns of metrics.csv."""
        of_momentum = {} if self._momentum is None else {"momentum_error": self._momentum}
        return {"cohort_error": relative(self.algorithm.mean, self._update)} | of_momentum
