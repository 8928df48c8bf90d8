"""Compares a round with what it would be otherwise, if ``run.diagnostics`` asks for it.

``all_clients``: if everybody took part. All clients make the round's local steps from the model and with the broadcast
that the cohort gets. Only the mean of their updates is taken; no client keeps anything of it.

``virtual``: if clients did not drift apart. The *virtual* model begins the round where the clients do. In each of its
steps its gradient is the mean of the gradients that all clients of the cohort have at it, each on its own mini-batch,
by their aggregation weights (the virtual global model of pFedMo's analysis, J. Fu, Z. Yang et al., IEEE Trans. Big
Data 2024).

In both cases the run goes on from the cohort alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.state.run import RunState
from fedray.engine.sums import CohortSums
from fedray.engine.task_queue import TaskQueue
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.tracking.diagnostics import UPDATE, Measured

HISTORY = "mean updates of all clients"
"""The server's vector with its updates of the last rounds as they would be with all clients, the oldest first, float32
``[at most tau, width]``."""


def comparison_of(state: RunState, experiment: Experiment, queue: TaskQueue) -> Callable[[], dict[str, float]]:
    """Makes what the round is to be compared with. The round must not have begun. The function that is returned is
    called after the round, and returns columns of metrics.csv."""
    wanted = experiment.config.run.diagnostics
    if wanted == "all_clients":
        return FullParticipation(state, experiment, queue).errors
    if wanted == "virtual":
        return VirtualModel(state, experiment).distance
    return dict


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
    cutter = TaskCutter(queue.pool, experiment.training, experiment.chunk, state.layout.row_width, experiment.lanes)
    cut = cutter.cut(everybody.server.cohort)
    tasks = [replace(task_of(each, cutter.work_of(each), sent, everybody, experiment), keeps=False) for each in cut]
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


class VirtualModel:
    """The comparison of one round. The virtual model is trained before the round, in this process, and :meth:`distance`
    is called after it."""

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        assert isinstance(experiment.algorithm, Measured)
        self.algorithm = algorithm = experiment.algorithm
        broadcast = algorithm.broadcast(state.server, algorithm.phases[0])
        cohort = state.as_cohort(state.server, broadcast)
        client = together(cohort)
        carry = algorithm.local_steps(client, algorithm.begin(client))
        self._update = algorithm.update_of(client, carry)[0]

    def distance(self) -> dict[str, float]:
        """Returns the column of metrics.csv."""
        return {"virtual_distance": float(torch.linalg.vector_norm(self.algorithm.mean - self._update))}


def together(cohort: ClientPhase) -> ClientPhase:
    """Returns the clients of a stack as one client, whose gradient is the mean of theirs by their weights.

    Its numbers (J, n, and what the server sent to each client) are their means by the same weights.
    """
    one = ClientPhase.__new__(ClientPhase)
    one.__dict__.update(cohort.__dict__)
    weights = torch.tensor(cohort.stack.weights, dtype=torch.float64, device=cohort.p.device)
    one.size = 1
    one.stack = replace(cohort.stack, steps=[max(cohort.stack.steps)])
    one.data = _OneData(cohort, weights)  # type: ignore[assignment]
    one.objective = _OneObjective(cohort, weights)  # type: ignore[assignment]
    one.scalars = {name: _mean(values, weights) for name, values in cohort.scalars.items()}
    one.__dict__.pop("p", None)
    one.__dict__.pop("gap", None)
    return one


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean ``[1, k]`` of rows ``[C, k]``."""
    return (weights @ values.double()).float()[None]


class _OneData:
    """The data of all clients of a stack as those of one, as far as an algorithm's local steps ask for them."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort = cohort
        self.n, self.J = _mean(cohort.n, weights), _mean(cohort.J, weights)

    def batches(self) -> Iterator[Batch]:
        return self._cohort.data.batches()


class _OneObjective:
    """The weighted mean of the clients' losses. Clients whose local steps are over count no more."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort, self._weights = cohort, weights
        self._steps: Sequence[int] = cohort.stack.steps

    def gradient(self, at: Model, batch: Batch) -> Tensor:
        """Returns the gradient ``[1, width]`` at the one model ``at``."""
        going = torch.tensor([batch.step < steps for steps in self._steps], device=self._weights.device)
        weights = torch.where(going, self._weights, 0.0)
        rows = self._cohort.objective.gradient(Model(at.row.expand(len(self._steps), -1).clone(), at.width), batch)
        return _mean(rows, weights / weights.sum())

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            "run.diagnostics=virtual is for algorithms whose local steps need the gradient of the task loss alone; use "
            "true"
        )
