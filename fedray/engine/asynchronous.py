"""Asynchronous rounds (``system.mode=buffered``): clients train from the model of the moment, and every K answers make
an update of the server's model (FedBuff: J. Nguyen et al., AISTATS 2022).

:class:`~fedray.system.buffered.Schedule` knows who begins with which model, and which update uses the answer. In round
r all clients are trained that begin with x^r, in groups: one for each update that will use some of them. The sum of a
group waits for its update as a difference from x^r. So the server keeps one sum for each update that is still to come,
and no model of a single client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from fedray.algorithms import Cohort
from fedray.data.federated import FederatedData
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.round import RoundResult, row_of
from fedray.engine.server_rules import server_rule
from fedray.engine.state.run import RunState
from fedray.engine.sums import CohortSums
from fedray.engine.task_queue import TaskQueue
from fedray.experiment.cohorts import weights_of
from fedray.experiment.experiment import Experiment
from fedray.experiment.system import clock_of, schedule_of
from fedray.system.buffered import Schedule, Start
from fedray.system.clock import DROPPED, USED, Asked
from fedray.system.devices import Devices
from fedray.tracking.costs import load_of

PHASE = "train"
"""The only phase of algorithms that can be asynchronous."""


class Asynchronous:
    """Makes the updates of a run with asynchronous rounds, one after another. ``schedule`` says who trains when,
    ``devices`` what the clients' devices are, and ``down`` how many bytes a client receives."""

    def __init__(
        self, schedule: Schedule, devices: Devices, down: int, experiment: Experiment, state: RunState
    ) -> None:
        self.schedule, self.devices, self.down = schedule, devices, down
        self.experiment, self.state = experiment, state

    def run(self, number: int, cutter: TaskCutter, queue: TaskQueue) -> RoundResult:
        """Trains the clients that begin with the model of round ``number``, and makes the update at its end. Returns
        the round's result, whose cohort are the clients whose answers the update uses, whenever they began."""
        began = time.perf_counter()
        state, server = self.state, self.state.server
        state.begin(number, self.experiment)
        result = RoundResult(number, Cohort())
        # what would only be used after the last round need not be trained
        last = self.experiment.rounds
        starts = [each for each in self.schedule.begin_with(number, last) if 0 < _update_of(each) <= last]
        self._train(starts, result, cutter, queue)
        answers = sorted(self.schedule.update(number).answers, key=_order)
        server.cohort = result.cohort = self._cohort(answers)
        self._update(number)
        with queue.profile.measure("transport"):
            queue.pool.settle()
        state.commit(number, result.states, queue.pool, server.cohort.ids)
        result.log = state.pending.rows_of([start.number for start in answers])
        # a float, because other rows have NaN
        result.log["staleness"] = [float(start.staleness) for start in answers]
        losses = [loss for loss in result.log.get("loss", []) if not math.isnan(loss)]
        result.asked = self._asked(number)
        result.samples = sum(load_of(size, self.experiment.training).seen for size in server.cohort.sizes)
        result.metrics = row_of(number, len(answers), losses, began)
        return result

    def _train(self, starts: Sequence[Start], result: RoundResult, cutter: TaskCutter, queue: TaskQueue) -> None:
        """Trains the clients of ``starts``, which begin with the server's model, and keeps what they send for their
        updates."""
        state, server, algorithm = self.state, self.state.server, self.experiment.algorithm
        groups: dict[int, _Group] = {}
        tasks, handle, samples = [], None, 0.0
        for update, some in groupby(sorted(starts, key=lambda start: (_update_of(start), *_order(start))), _update_of):
            members = list(some)
            server.cohort = self._cohort(members, self._weights(update, members))
            with server_rule(algorithm, "broadcast", server, PHASE):
                broadcast = algorithm.broadcast(server, PHASE)
            handle = queue.pool.publish(broadcast.shared) if handle is None else handle
            sent = [Sent(handle, broadcast.scalars)]
            cut = cutter.cut(server.cohort)
            made = [replace(task_of(part, sent, state, self.experiment), sum=update) for part in cut]
            samples += cutter.samples
            sums = CohortSums(algorithm, PHASE, len(members), state.layout, state.device)
            groups |= dict.fromkeys(map(id, made), _Group(update, members, server.cohort, sums))
            tasks += made
        for task, found in queue.run(tasks):
            group = groups[id(task)]
            group.sums.add(task, found)
            for place, number in zip(task.positions, range(len(task.ids)), strict=True):
                values = {name: column[number] for name, column in found.log.items()}
                state.pending.note(group.starts[place].number, values)
            queue.pool.drop(result.keep(task, found))
        for group in dict.fromkeys(groups.values()):
            for name, total in group.sums.totals().items():
                state.pending.add(group.update, name, total, group.cohort, server["x"])
        if samples:
            cutter.learn(result.worker_seconds, samples)

    def _weights(self, update: int, members: Sequence[Start]) -> list[float]:
        """Returns the weights of some of the answers that an update uses: their aggregation weights p_i among all its
        answers, less for those that are late (``system.staleness``). FedBuff does not divide by their sum."""
        answers = self.schedule.update(update).answers
        sizes = self.state.sizes[[start.client for start in answers]]
        p = dict(zip((start.number for start in answers), weights_of(sizes, self.experiment.weighting), strict=True))
        polynomial = self.experiment.config.system.staleness == "polynomial"
        return [p[start.number] / math.sqrt(1 + start.staleness if polynomial else 1) for start in members]

    def _cohort(self, members: Sequence[Start], weights: Sequence[float] | None = None) -> Cohort:
        """Returns the clients of ``members``, in their order, as a cohort of the current round."""
        ids = np.array([start.client for start in members], np.int64)
        cohort = cohort_of(ids, self.state, self.experiment, self.state.server.round)
        return cohort if weights is None else replace(cohort, weights=weights)

    def _update(self, number: int) -> None:
        """Makes the update at the end of round ``number``, unless nobody has answered."""
        server = self.state.server
        if sums := self.state.pending.take(number, server["x"]):
            algorithm = self.experiment.algorithm
            with server_rule(algorithm, "server_update", server, PHASE):
                algorithm.server_update(server, PHASE, sums, {})

    def _asked(self, number: int) -> Asked:
        """Returns what became of the clients that ended in round ``number``, in the order of their numbers."""
        update = self.schedule.update(number)
        ended = sorted([*update.answers, *update.dropped], key=_order)
        ids = np.array([start.client for start in ended], np.int64)
        outcomes = [USED if start.update else DROPPED for start in ended]
        took = np.array([start.ended - start.began for start in ended])
        before = self.schedule.update(number - 1).time if number > 1 else 0.0
        used = np.array([outcome == USED for outcome in outcomes], bool)
        return Asked(
            ids, outcomes, np.where(used, took, math.nan), used, update.time - before,
            joules=math.fsum(self.devices.watts[ids[used]] * took[used]),
            bytes_down=self.down * int((~used).sum()),
        )  # fmt: skip


@dataclass(eq=False)
class _Group:
    """Clients that begin with the same model, and whose answers the same update uses."""

    update: int
    starts: Sequence[Start]
    cohort: Cohort
    sums: CohortSums


def _order(start: Start) -> tuple[int, int]:
    return start.client, start.number


def _update_of(start: Start) -> int:
    return start.update or 0


def asynchronous_of(experiment: Experiment, data: FederatedData, state: RunState) -> Asynchronous | None:
    """Returns what makes the rounds of a run with ``system.mode=buffered``, or None if rounds are synchronous."""
    clock = clock_of(experiment, data)
    if clock is None or clock.system.mode == "sync":
        return None
    schedule = schedule_of(clock, np.flatnonzero(state.sizes))
    return Asynchronous(schedule, clock.devices, clock.phases[0].down, experiment, state)
