"""Runs one round of federated learning. This is the first file to read.

First the cohort is drawn. Then each phase of the algorithm (most algorithms have one) takes the same steps: the server
broadcasts, the clients of the cohort compute, their uploads are summed, and the server updates its state. At the end
the clients' new states replace the old ones. No bit of the result depends on which worker simulates a client, or on the
order.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedray.algorithms import Algorithm, Cohort, ServerState
from fedray.core.vectors import Vector
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.diagnostics import comparison_of, without_clients
from fedray.engine.privacy import privacy_columns, released, with_clip
from fedray.engine.robust import robust_sums
from fedray.engine.selection import ClientChoice
from fedray.engine.server_rules import server_rule
from fedray.engine.state.run import RunState
from fedray.engine.state.states import StateFile
from fedray.engine.sums import CohortSums
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import PhaseResult, PhaseTask, TaskResult, working_seconds
from fedray.engine.virtual_time import VirtualTime
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.system.clock import Asked
from fedray.warning import WARNING


@dataclass
class RoundResult:
    """The result of a round. :func:`run_round` makes it, and then the run's observers (objects that evaluate and record
    each round) complete it.

    Attributes:
        number: The number of the round, from 1.
        cohort: The clients that took part.
        log: Maps each column of clients.parquet to a list with a value for each client of the cohort, in the order of
            ids. During the round a value is None until a phase of the algorithm (a part of the round) sets it. Values
            that are still None at the end of the round become NaN.
        states: Maps each client's number to the file with its new state, which is what it keeps until it takes part
            again.
        models: Maps the numbers of clients to their trained models, each as a row of numbers. It has only the clients
            whose models are to be saved or evaluated (``run.local_models_of``, ``run.eval_local_models``).
        worker_seconds: The working time of all workers together, in seconds.
        samples: The number of samples in all local mini-batches of the round.
        metrics: The round's row of metrics.csv, as a dict from the column to its value.
        scores: The round's rows of evaluation.parquet, as a dict from the column to its values; None if the round is
            not evaluated.
        layers: The round's rows of layers.parquet, as a dict from the column to its values; None without
            ``run.diagnostics``.
        profile: Maps each purpose, a column of profile.csv such as "gradient", to the seconds that the round spent on
            it.
        diverged: Whether the mean loss of the round or the model is not finite.
        asked: What became of the clients that were drawn, by the virtual clock; None without one.
        candidates: The clients that have computed their losses before the choice.
        changes_clients: Whether clients keep what they have made of their states in this round.
        is_last: Whether the run ends with this round before ``run.rounds``, as no client can be reached any more.
    """

    number: int
    cohort: Cohort
    log: dict[str, Any] = field(default_factory=dict)
    states: dict[int, StateFile] = field(default_factory=dict)
    models: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    worker_seconds: float = 0.0
    samples: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Any] | None = None
    layers: dict[str, Any] | None = None
    profile: dict[str, float] = field(default_factory=dict)
    diverged: bool = False
    asked: Asked | None = None
    candidates: Sequence[int] = ()
    changes_clients: bool = True
    is_last: bool = False

    def add(self, task: PhaseTask, found: PhaseResult) -> list[StateFile]:
        """Adds ``found``, the result of ``task``, to the result of the round: working time, trained models to be saved,
        columns of clients.parquet, and the files of new client states. Returns the state files that are replaced by
        those in ``found``: earlier phases of the same round wrote them for the same clients. The caller can delete them
        now."""
        for name, values in found.log.items():
            column = self.log.setdefault(name, [None] * len(self.cohort.ids))
            for place, value in zip(task.positions, values, strict=True):
                column[place] = column[place] if value is None else value
        return self.keep(task, found)

    def keep(self, task: PhaseTask, found: PhaseResult) -> list[StateFile]:
        """Adds what :meth:`add` does, but no columns of clients.parquet."""
        self.worker_seconds += working_seconds(found.seconds)
        self.models |= found.models
        new = dict(zip(task.ids, found.states, strict=True)) if found.states else {}
        old = [self.states[client] for client in new if client in self.states]
        self.states |= new
        return old


def run_round(
    number: int, state: RunState, experiment: Experiment, cutter: TaskCutter, queue: TaskQueue, time_of: VirtualTime
) -> RoundResult:
    """Runs round ``number`` (from 1), and returns its result, which is not yet evaluated. ``state``, which has the
    server's and the clients' states, is updated. ``cutter`` cuts the cohort into tasks, and ``queue`` sends the tasks
    to the workers. ``time_of`` is the virtual clock, which knows who answers in time. If nobody does, the server's
    model stays as it is."""
    began = time.perf_counter()
    server = state.server
    state.begin(number, experiment)
    choice = ClientChoice(experiment, state, cutter, queue)
    (drawn, why), candidates = choice.choose(number)
    asked = time_of.draw(drawn, number)
    choice.note_losses()
    result = RoundResult(number, server.cohort, asked=asked, candidates=candidates)
    privacy = privacy_columns(experiment, state, number)
    if not server.cohort.ids:
        without_clients(state, experiment.algorithm)
        if asked is not None and len(asked.ids) and experiment.privacy is None:
            _tell(queue, f"{WARNING}in a round no client has answered in time: such a round changes nothing")
    compared = _train(result, state, experiment, cutter, queue) if server.cohort.ids else {}
    if experiment.privacy is not None and not server.cohort.ids:
        sums = state.with_private(released({}, state, experiment.privacy))
        phase = experiment.algorithm.phases[0]
        with server_rule(experiment.algorithm, "server_update", server, phase):
            experiment.algorithm.server_update(server, phase, sums, {})
    with queue.profile.measure("transport"):
        queue.pool.settle()
    state.commit(number, result.states, queue.pool, server.cohort.ids if result.changes_clients else ())
    result.log |= {name: _of_cohort(name, values, experiment, server) for name, values in server.client_scalars.items()}
    if (name := experiment.selection.why) and why is not None:
        result.log[name] = why[np.isin(drawn, server.cohort.ids)].tolist()
    of_clients = dict(zip(server.cohort.ids, result.log.get("loss", []), strict=False))
    losses = [loss for loss in of_clients.values() if loss is not None]
    choice.note_training(of_clients, asked)
    result.log = {name: [math.nan if x is None else x for x in values] for name, values in result.log.items()}
    result.metrics = row_of(number, len(server.cohort.ids), losses, began) | compared | privacy
    return result


def row_of(number: int, members: int, losses: Sequence[float], began: float) -> dict[str, float]:
    """Returns what the row of every round ``number`` in metrics.csv begins with, by column. The cohort had this number
    of ``members``, and ``losses`` are those of its clients that took gradients. ``began`` is when the round began, by
    ``time.perf_counter``."""
    row: dict[str, float] = {"round": number, "cohort_size": members}
    # a cohort that took no gradient has no loss, which is different from a loss of NaN
    if losses:
        row["train_loss"] = math.fsum(losses) / len(losses)
    return row | {"round_seconds": time.perf_counter() - began}


def _train(
    result: RoundResult, state: RunState, experiment: Experiment, cutter: TaskCutter, queue: TaskQueue
) -> dict[str, float]:
    """Runs all phases of the round for its cohort, and adds what workers found to ``result``. Returns the columns of
    metrics.csv that compare the cohort with other clients (``run.diagnostics``)."""
    server, algorithm = state.server, experiment.algorithm
    compare = comparison_of(state, experiment, queue)
    server_training = start_server_training(algorithm, server, queue.concurrent, experiment.config.engine.threads)

    cut = cutter.cut(server.cohort)
    sent: list[Sent] = []
    for phase in algorithm.phases:
        if phase == algorithm.server_training_before:
            with server_rule(algorithm, "server_training", server):
                server.vectors |= server_training.result()
        with server_rule(algorithm, "broadcast", server, phase):
            broadcast = algorithm.broadcast(server, phase)
        shared = with_clip(broadcast.shared, state, experiment.privacy)
        sent.append(Sent(queue.pool.publish(shared), broadcast.scalars))
        tasks = [task_of(part, sent, state, experiment) for part in cut]
        sums = CohortSums(algorithm, phase, len(server.cohort.ids), state.layout, state.device)
        # a later phase goes to the worker that has the kept values of the phase before
        for task, found in queue.run(tasks, sticky=len(sent) > 1):
            sums.add(task, found)
            queue.pool.drop(result.add(task, found))
        totals = released(sums.totals(), state, experiment.privacy)
        aggregates = robust_sums(totals, sums.gathered, experiment.robust, state, partial(_tell, queue))
        if aggregates is None:
            # too few for the robust rule: clients, too, stay as they are
            queue.pool.drop(result.states.values())
            result.states, result.changes_clients = {}, False
            break
        totals = state.with_private(aggregates)
        with server_rule(algorithm, "server_update", server, phase):
            algorithm.server_update(server, phase, totals, sums.scalars)

    result.samples = cutter.samples
    cutter.learn(result.worker_seconds, result.samples)
    return compare()


def _of_cohort(name: str, values: Any, experiment: Experiment, server: ServerState) -> list[float]:
    """Returns the ``values`` of a column of clients.parquet that an algorithm's server has set, as a float for each
    client of the cohort. Raises :class:`UserError` if they are anything else."""
    count, where = len(server.cohort.ids), f"{experiment.config.algorithm.name}: server.client_scalars[{name!r}]"
    if not isinstance(values, Mapping):
        with contextlib.suppress(TypeError, ValueError):
            found = [float(value) for value in values]
            if len(found) == count:
                return found
    raise UserError(f"{where} of round {server.round} must have a number for each of the {count} clients of the cohort")


def _tell(queue: TaskQueue, line: str) -> None:
    """Shows a line to the user, and notes it in the records of the run."""
    queue.note(TaskResult(lines=(line,)))


def start_server_training(
    algorithm: Algorithm, server: ServerState, concurrent: bool, threads: int
) -> Future[Mapping[str, Vector]]:
    """Starts the training of models by the server itself (``Algorithm.server_training``), which only some algorithms
    have. Returns a future, whose result is a dict of the trained models and vectors by name. For algorithms without
    such training the dict is empty.

    ``server`` is the server's state, with which the training begins. With ``concurrent`` the server trains in a
    separate thread while the clients train. Otherwise the training has ended when this function returns. torch computes
    with ``threads`` threads.
    """
    future: Future[Mapping[str, Vector]] = Future()

    def train() -> None:
        try:
            torch.set_num_threads(threads)
            future.set_result(algorithm.server_training(server))
        except BaseException as error:
            future.set_exception(error)

    if algorithm.server_training_before is None:
        future.set_result({})
    elif concurrent:
        threading.Thread(target=train, name="server training").start()
    else:
        train()
    return future
