"""Lets a selection choose the clients of each round, and notes what it needs for later choices."""

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
from fedray.experiment.cohorts import chosen_of, known_of
from fedray.experiment.experiment import Experiment
from fedray.selection import LOSS, ROOT_MEAN_SQUARE, SECONDS, Chosen, Losses
from fedray.system.clock import Asked


class ClientChoice:
    """Lets the selection of ``experiment`` choose the clients of each round (``train.sampling``), and notes what it
    needs for later choices. ``state`` is that of the run, ``cutter`` cuts clients into tasks, and ``queue`` sends the
    tasks to workers."""

    def __init__(self, experiment: Experiment, state: RunState, cutter: TaskCutter, queue: TaskQueue) -> None:
        self.experiment, self.state, self.cutter, self.queue = experiment, state, cutter, queue
        self.columns = experiment.selection.columns

    def choose(self, number: int) -> tuple[Chosen, list[int]]:
        """Returns the clients of round ``number``, and those that have computed their losses before the choice."""
        if self.state.order.cohort is not None:
            return Chosen(np.array(self.state.order.cohort, np.int64)), []
        server = self.state.server
        known = known_of(
            number, self.state.sizes, self.experiment, server.last_round, server.table, self._losses_or_passing
        )
        try:
            return chosen_of(known, self.experiment), known.asked
        except _Passing as error:
            raise error.error from None

    def note_losses(self) -> None:
        """Notes the losses of the model that the cohort of this round receives, if later choices need them."""
        cohort = self.state.server.cohort
        if ROOT_MEAN_SQUARE not in self.columns or not cohort.ids:
            return
        found = self._losses(np.array(cohort.ids)).root_mean_square
        found[np.isinf(found)] = np.nan
        self._note(ROOT_MEAN_SQUARE, dict(zip(cohort.ids, found.tolist(), strict=True)))

    def note_training(self, losses: Mapping[int, float | None], asked: Asked | None) -> None:
        """Notes the training ``losses`` of a round's clients, None for those that took no gradient, and how long the
        clients that were ``asked`` took, if later choices need them."""
        if LOSS in self.columns:
            self._note(LOSS, {client: math.nan if loss is None else loss for client, loss in losses.items()})
        if SECONDS in self.columns and asked is not None:
            self._note(SECONDS, dict(zip(asked.ids.tolist(), asked.seconds.tolist(), strict=True)))

    def _note(self, name: str, values: Mapping[int, float]) -> None:
        known = {client: value for client, value in values.items() if not math.isnan(value)}
        self.state.server.column(name).update(known)

    def _losses_or_passing(self, clients: NDArray[np.int64]) -> Losses:
        try:
            return self._losses(clients)
        except Exception as error:
            raise _Passing(error) from error

    def _losses(self, clients: NDArray[np.int64]) -> Losses:
        """Lets each of the ``clients`` compute the losses of the server's model over all its samples."""
        server, cohort = self.state.server, self.state.server.cohort
        server.cohort = cohort_of(clients, self.state, self.experiment, server.round)
        broadcast = Algorithm.broadcast(self.experiment.algorithm, server, "candidates")
        sent = [Sent(self.queue.pool.publish(broadcast.shared), broadcast.scalars)]
        parts = self.cutter.cut(server.cohort)
        tasks = [task_of(part, sent, self.state, self.experiment) for part in parts]
        tasks = [replace(task, phase=CANDIDATES, models_of=()) for task in tasks]
        found: dict[str, dict[int, float]] = {}
        for task, result in self.queue.run(tasks, sticky=False):
            for name, values in result.scalars.items():
                found.setdefault(name, {}).update(zip(task.ids, values, strict=True))
        server.cohort = cohort
        mean, squares = (
            np.array([found[name][client] for client in clients.tolist()]) for name in ("loss", "root_mean_square")
        )
        return Losses(mean, squares)


class _Passing(BaseException):
    """Takes an ``error`` of the engine, such as a lost state, through the code of a selection, which did not make it
    and must not catch it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
