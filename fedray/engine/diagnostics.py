"""Compares each round with a hypothetical one, if ``run.diagnostics`` asks for it.

``all_clients`` compares it with a round in which all clients take part. They make the round's local steps from the same
model and broadcast as the cohort. Only the mean of their updates is used; their states stay as they were.

``virtual`` compares it with a round in which clients do not drift apart. The *virtual* model begins the round with the
model that the clients received. In each step all clients of the cohort compute their gradients at the virtual model,
each on its own mini-batch, and the mean of these gradients by the aggregation weights is the gradient of the virtual
model (the virtual global model of pFedMo's analysis, S. Fu, Z. Yang et al., IEEE Trans. Big Data 2024).

The comparison does not influence the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.algorithms import Algorithm
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.server_rules import server_rule
from fedray.engine.state.run import RunState
from fedray.engine.sums import CohortSums
from fedray.engine.task_queue import TaskQueue
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.tracking.diagnostics import LOCAL_UPDATE, Measured

HISTORY = "mean updates of all clients"
"""The name of one of the server's vectors: the updates that the server would have made with all clients in the
last rounds, float32 ``[rounds, width]``, the oldest first. It has at most as many rows as the momentum's window
has rounds."""


def comparison_of(state: RunState, experiment: Experiment, queue: TaskQueue) -> Callable[[], dict[str, float]]:
    """Prepares to compare the round that is about to train with a hypothetical round, as ``run.diagnostics`` asks.
    ``queue`` sends the training of further clients to the workers.

    Returns a function without arguments, to be called after the round. It returns what the comparison adds to the
    round's row of metrics.csv, as values by column. For ``run.diagnostics=all_clients`` the columns are
    ``cohort_error`` and, for some algorithms, ``momentum_error``. For ``run.diagnostics=virtual`` there is one,
    ``virtual_distance``. Otherwise the dict is empty.
    """
    wanted = experiment.config.run.diagnostics
    if wanted == "all_clients":
        return FullParticipation(state, experiment, queue).errors
    if wanted == "virtual":
        return VirtualModel(state, experiment).distance
    return dict


def without_clients(state: RunState, algorithm: Algorithm) -> None:
    """Records an update of zero for a round without clients, so that later rounds are compared with the right
    history."""
    if isinstance(algorithm, Measured) and HISTORY in state.server.vectors:
        window = algorithm.momentum_window
        assert window is not None
        remember(state, torch.zeros_like(state.server[HISTORY][0]), window)


class FullParticipation:
    """Compares one round with a hypothetical round in which all clients take part (``run.diagnostics=all_clients``).

    An instance is made before the clients of the cohort train. It trains all clients, by tasks that ``queue`` sends to
    the workers, from the model that the cohort will receive. :meth:`errors` is called after the round.
    """

    def __init__(self, state: RunState, experiment: Experiment, queue: TaskQueue) -> None:
        assert isinstance(experiment.algorithm, Measured)
        self.algorithm = experiment.algorithm
        window = self.algorithm.momentum_window
        self._momentum = momentum_error(state, window) if window else None
        self._update = update_of_all(state, experiment, queue)
        if window:
            # the server's rule multiplies the mean update by its learning rate
            remember(state, state.server.server_lr * self._update, window)

    def errors(self) -> dict[str, float]:
        """Returns what the comparison adds to the round's row of metrics.csv, as values by column. Called after the
        round.

        ``cohort_error`` is the relative error of the cohort's mean update, compared with the mean update of all
        clients. ``momentum_error`` is the relative error of the server's momentum, compared with the momentum that full
        participation gives. It is there only for algorithms whose momentum is the mean of the last tau updates, as
        GHBM's is, and only from round tau + 1 on.
        """
        of_momentum = {} if self._momentum is None else {"momentum_error": self._momentum}
        return {"cohort_error": relative(self.algorithm.mean, self._update)} | of_momentum


def update_of_all(state: RunState, experiment: Experiment, queue: TaskQueue) -> Tensor:
    """Returns the mean ``[width]``, by the aggregation weights, of the local updates that all clients would make in the
    round that begins.

    All clients that hold samples are trained for this, by tasks that ``queue`` sends to the workers, from the same
    model and broadcast as the cohort. Their new states are thrown away.
    """
    algorithm, number = experiment.algorithm, state.server.round
    everybody = copy.copy(state)
    ids = np.flatnonzero(state.sizes)
    everybody.server = replace(state.server, cohort=cohort_of(ids, state, experiment, number))
    phase = algorithm.phases[0]
    with server_rule(algorithm, "broadcast", state.server, phase):
        broadcast = algorithm.broadcast(everybody.server, phase)
    sent = [Sent(queue.pool.publish(broadcast.shared), broadcast.scalars)]
    cutter = TaskCutter(queue.pool, experiment.training, experiment.chunk, state.layout.row_width, experiment.lanes)
    cut = cutter.cut(everybody.server.cohort)
    tasks = [replace(task_of(part, sent, everybody, experiment), keeps=False, models_of=()) for part in cut]
    sums = CohortSums(algorithm, phase, len(ids), state.layout, state.device)
    for task, found in queue.run(tasks):
        sums.add(task, found)
        queue.pool.drop(found.states)
    return torch.as_tensor(sums.totals()[LOCAL_UPDATE])


def momentum_error(state: RunState, window: int) -> float | None:
    """Returns the relative error of the server's momentum at the start of a round, compared with full participation, or
    None in the first ``window`` rounds.

    The momentum is the mean of the server's updates in the last tau = ``window`` rounds, (x^r - x^{r-tau}) / tau. It is
    compared with the mean of the updates that the server would have made in these rounds with all clients, from the
    same models (:func:`remember` has stored them). The error is the norm of the difference, divided by the norm of the
    mean with all clients.
    """
    server = state.server
    if server.round <= window:
        return None
    own = (server["x"] - server.model_of(server.round - window)) / window
    return relative(own, server[HISTORY].mean(0))


def remember(state: RunState, update: Tensor, window: int) -> None:
    """Stores ``update`` for :func:`momentum_error`. It is the change, a vector ``[width]``, that the server would make
    to its model in this round if all clients took part.

    It is appended to the server's vector with the name :data:`HISTORY`, which keeps the updates of the last ``window``
    rounds; older ones are removed."""
    known = state.server.vectors.get(HISTORY)
    rows = update[None] if known is None else torch.cat([torch.as_tensor(known), update[None]])
    state.server[HISTORY] = rows[-window:].contiguous()


def relative(found: Tensor, wanted: Tensor) -> float:
    """Returns the relative error of ``found``: the norm of ``found - wanted``, divided by the norm of ``wanted``."""
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


class VirtualModel:
    """Compares one round with a hypothetical one in which the clients' models do not drift apart
    (``run.diagnostics=virtual``).

    The virtual model begins as the model that the clients receive. In each local step all clients of the cohort compute
    their gradients at the virtual model, and the virtual model makes a step with the weighted mean of these gradients.
    An instance is made before the round, and trains the virtual model in this process. :meth:`distance` is called after
    the round.
    """

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        assert isinstance(experiment.algorithm, Measured)
        self.algorithm = algorithm = experiment.algorithm
        with server_rule(algorithm, "broadcast", state.server, algorithm.phases[0]):
            broadcast = algorithm.broadcast(state.server, algorithm.phases[0])
        cohort = state.as_cohort(state.server, broadcast)
        client = together(cohort)
        carry = algorithm.local_steps(client, algorithm.begin(client))
        self._update = algorithm.update_of(client, carry)[0]

    def distance(self) -> dict[str, float]:
        """Returns what the comparison adds to the round's row of metrics.csv: ``virtual_distance``, the Euclidean
        distance between the mean of the clients' models after the round's local steps and the virtual model. Called
        after the round."""
        return {"virtual_distance": float(torch.linalg.vector_norm(self.algorithm.mean - self._update))}


def together(cohort: ClientPhase) -> ClientPhase:
    """Returns a single client that stands for all clients of ``cohort``. Its gradient is the weighted mean of their
    gradients, all at the same model. So an algorithm's local steps with this client train the virtual model
    (:class:`VirtualModel`).

    The client's numbers are weighted means too: J (local steps), n (samples), and the scalars that the server sent to
    each client.
    """
    one = copy.copy(cohort)
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
    """Returns the mean ``[1, k]`` of the rows ``values [C, k]``, weighted by ``weights [C]``."""
    return (weights @ values.double()).float()[None]


class _OneData:
    """The data of a stack's clients as the data of one client, with the members that algorithms use in local steps."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort = cohort
        self.n, self.J = _mean(cohort.n, weights), _mean(cohort.J, weights)

    def batches(self) -> Iterator[Batch]:
        return self._cohort.data.batches()

    def begins_epoch(self, j: int) -> Tensor:
        raise UserError(
            "run.diagnostics=virtual: the epochs of clients, in which something begins anew, differ; use true"
        )


class _OneObjective:
    """The weighted mean of the clients' losses. Clients that have made all their local steps no longer count."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort, self._weights = cohort, weights
        self._steps: Sequence[int] = cohort.stack.steps

    def gradient(self, at: Model, batch: Batch) -> Tensor:
        """Returns the weighted mean ``[1, width]`` of the clients' gradients at the model ``at``, each on the client's
        own part of ``batch``."""
        going = torch.tensor([batch.step < steps for steps in self._steps], device=self._weights.device)
        weights = torch.where(going, self._weights, 0.0)
        rows = self._cohort.objective.gradient(Model(at.row.expand(len(self._steps), -1).clone(), at.width), batch)
        return _mean(rows, weights / weights.sum())

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            "run.diagnostics=virtual is for algorithms whose local steps need the gradient of the task loss alone; use "
            "true"
        )
