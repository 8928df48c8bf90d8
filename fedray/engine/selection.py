"""Chooses the clients of a round among candidates, by their losses at the server's model.

Y. J. Cho, J. Wang, G. Joshi: Towards Understanding Biased Client Selection in Federated Learning. AISTATS 2022, Section
3: power-of-choice, and its variant rpow-d with the losses that are known (``cached``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Algorithm
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import CANDIDATES
from fedray.experiment.experiment import Experiment

LOSS = "loss when it last took part"
"""The server's column of the clients' training losses."""


def chosen_of(
    candidates: NDArray[np.int64], number: int, state: RunState, experiment: Experiment, cutter: TaskCutter,
    queue: TaskQueue,
) -> tuple[NDArray[np.int64], dict[int, float]]:  # fmt: skip
    """Returns those of the clients ``candidates`` whose losses are largest, sorted ids, as many as are drawn for round
    ``number``, and the losses by which they were chosen. The losses are those of the server's model over all samples of
    a client, or with ``train.sampling.cached`` those of its last participation; a client that never took part comes
    first, and of equal ones the first ids."""
    if experiment.sampling.cached:
        known = state.server.column(LOSS)
        losses = {client: known.get(client, math.inf) for client in candidates.tolist()}
    else:
        losses = _measured(candidates, number, state, experiment, cutter, queue)
    order = sorted(losses, key=lambda client: (-_known(losses[client]), client))
    return np.sort(np.array(order[: experiment.clients_drawn], np.int64)), losses


def _known(loss: float) -> float:
    """Returns ``loss``, or minus infinity if it is not a number, as of a client all of whose tokens are ignored."""
    return -math.inf if math.isnan(loss) else loss


def remember(losses: Mapping[int, float], state: RunState) -> None:
    """Stores the training losses of a round's clients, for the choices of later rounds."""
    state.server.column(LOSS).update({client: loss for client, loss in losses.items() if not math.isnan(loss)})


def _measured(
    candidates: NDArray[np.int64], number: int, state: RunState, experiment: Experiment, cutter: TaskCutter,
    queue: TaskQueue,
) -> dict[int, float]:  # fmt: skip
    """Lets each of the candidates compute the loss of the server's model over all its samples."""
    server = state.server
    server.cohort = cohort_of(candidates, state, experiment, number)
    broadcast = Algorithm.broadcast(experiment.algorithm, server, "candidates")
    sent = [Sent(queue.pool.publish(broadcast.shared), broadcast.scalars)]
    tasks = [replace(task_of(part, sent, state, experiment), phase=CANDIDATES) for part in cutter.cut(server.cohort)]
    losses: dict[int, float] = {}
    for task, found in queue.run(tasks, sticky=False):
        losses |= dict(zip(task.ids, found.scalars["loss"], strict=True))
    return {client: losses[client] for client in candidates.tolist()}
