"""Chooses the clients of a round by what the server knows of them: their losses, sizes and pace.

Power-of-choice: Y. J. Cho, J. Wang, G. Joshi: Towards Understanding Biased Client Selection in Federated Learning.
AISTATS 2022, Section 3; ``cached`` is its variant rpow-d. Oort: F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury: Oort:
Efficient Federated Learning via Guided Participant Selection. OSDI 2021, Algorithm 1 and Equation 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Algorithm
from fedray.core.seeds import Purpose, stream
from fedray.engine.cohorts import cohort_of
from fedray.engine.cutting import Sent, TaskCutter, task_of
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import CANDIDATES
from fedray.experiment.cohorts import draw_of
from fedray.experiment.experiment import Experiment
from fedray.system.clock import Asked

LOSS = "loss when it last took part"
"""The server's column of the clients' training losses."""

UTILITY, SECONDS = "utility when it last took part", "seconds when it last took part"
"""The server's columns of n_i times the root of the mean of the squared losses, and of virtual seconds."""

EXPLORED, DECAY, LEAST_EXPLORED = 0.9, 0.98, 0.2
"""The share of Oort's clients that never took part: in round 1, its factor per round, and the least."""

CUT = 0.95
"""The quantile of the utilities at which larger ones are cut."""


class Selection:
    """Chooses the clients of each round (``train.sampling``), and notes what later choices need."""

    def __init__(self, experiment: Experiment, state: RunState, cutter: TaskCutter, queue: TaskQueue) -> None:
        self.experiment, self.state, self.cutter, self.queue = experiment, state, cutter, queue
        self.sampling = experiment.sampling

    def choose(self, number: int) -> tuple[NDArray[np.int64], dict[int, float]]:
        """Returns the clients for round ``number``, sorted ids, and the losses or utilities by which they were chosen
        among others, by client; nothing if they are only drawn."""
        if self.state.order.cohort is not None:
            return np.array(self.state.order.cohort, np.int64), {}
        if self.sampling.kind == "oort":
            return self._useful(number)
        drawn = draw_of(self.state.sizes, self.experiment, number, choice=True)
        return (drawn, {}) if self.sampling.candidates is None else self._largest_losses(drawn, number)

    def note(self, losses: Mapping[int, float | None], asked: Asked | None) -> None:
        """Notes the training ``losses`` of a round's clients, None for those that took no gradient, and how long the
        clients took, for the choices of later rounds."""
        if self.sampling.cached:
            known = {client: loss for client, loss in losses.items() if loss is not None and not math.isnan(loss)}
            self.state.server.column(LOSS).update(known)
        if asked is not None and self.sampling.seconds is not None:
            took = dict(zip(asked.ids.tolist(), asked.seconds.tolist(), strict=True))
            known = {client: seconds for client, seconds in took.items() if not math.isnan(seconds)}
            self.state.server.column(SECONDS).update(known)

    def measure(self, number: int) -> None:
        """Notes how useful the clients of round ``number`` are, by the losses of the model that they have received."""
        cohort = self.state.server.cohort
        if self.sampling.kind != "oort" or not cohort.ids:
            return
        found = self._measured(np.array(cohort.ids), number)["root_mean_square"]
        utilities = {i: self.state.sizes[i] * loss for i, loss in found.items() if math.isfinite(loss)}
        self.state.server.column(UTILITY).update(utilities)

    def _largest_losses(self, candidates: NDArray[np.int64], number: int) -> tuple[NDArray[np.int64], dict[int, float]]:
        """Returns those of the clients ``candidates`` whose losses are largest, and the losses of all of them. The
        losses are those of the server's model over all samples of a client, or with ``train.sampling.cached`` those of
        its last participation; a client that never took part comes first, and of equal ones the first ids."""
        if self.sampling.cached:
            known = self.state.server.column(LOSS)
            losses = {client: known.get(client, math.inf) for client in candidates.tolist()}
        else:
            losses = self._measured(candidates, number)["loss"]
        order = sorted(losses, key=lambda client: (-_known(losses[client]), client))
        return np.sort(np.array(order[: self.experiment.clients_drawn], np.int64)), losses

    def _useful(self, number: int) -> tuple[NDArray[np.int64], dict[int, float]]:
        """Returns Oort's clients: a share that never took part, and others in proportion to their utilities."""
        state, count = self.state, self.experiment.clients_drawn
        # whoever has computed a loss has not taken part if too few answered for a robust rule
        known = np.array(sorted(state.server.column(UTILITY).keys() & state.server.last_round.keys()), np.int64)
        new = np.setdiff1d(np.flatnonzero(state.sizes), known, assume_unique=True)
        share = max(LEAST_EXPLORED, EXPLORED * DECAY ** (number - 1))
        explored = min(len(new), max(round(share * count), count - len(known)))
        rng = stream(self.experiment.config.run.seed, Purpose.COHORT, number)
        chosen = [rng.choice(new, explored, replace=False)]
        why = dict.fromkeys(chosen[0].tolist(), math.nan)
        if count > explored:
            values = np.array([self._utility(client, number) for client in known.tolist()])
            cut = np.minimum(values, np.quantile(values, CUT)) + np.finfo(float).tiny
            places = rng.choice(len(known), count - explored, replace=False, p=cut / cut.sum())
            chosen.append(known[places])
            why |= dict(zip(known[places].tolist(), values[places].tolist(), strict=True))
        return np.sort(np.concatenate(chosen).astype(np.int64)), why

    def _utility(self, client: int, number: int) -> float:
        """Returns n_i sqrt(mean loss^2) + sqrt(0.1 ln r / last_i), times (T / t_i)^alpha for a client that takes longer
        than T."""
        server, sampling = self.state.server, self.sampling
        utility = server.column(UTILITY)[client] + math.sqrt(0.1 * math.log(number) / server.last_round[client])
        took = server.column(SECONDS).get(client, 0.0) if sampling.seconds is not None else 0.0
        if sampling.seconds is None or took <= sampling.seconds:
            return utility
        return float(utility * (sampling.seconds / took) ** (2.0 if sampling.alpha is None else sampling.alpha))

    def _measured(self, clients: NDArray[np.int64], number: int) -> dict[str, dict[int, float]]:
        """Lets each of the ``clients`` compute the losses of the server's model over all its samples. Returns for each
        kind of loss the number of each client."""
        server, cohort = self.state.server, self.state.server.cohort
        server.cohort = cohort_of(clients, self.state, self.experiment, number)
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
        return {name: {client: of_client[client] for client in clients.tolist()} for name, of_client in found.items()}


def _known(loss: float) -> float:
    """Returns ``loss``, or minus infinity if it is not a number, as of a client all of whose tokens are ignored."""
    return -math.inf if math.isnan(loss) else loss
