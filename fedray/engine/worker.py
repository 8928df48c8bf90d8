"""A worker does tasks. It keeps nothing that another worker would miss if it did the task instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedray.algorithms.base import Broadcast
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase, Stack
from fedray.core.clock import Clock
from fedray.core.seeds import SERVER, Purpose, stream
from fedray.engine.clients import Clients
from fedray.engine.determinism import FLASH, is_refused, nondeterministic_operations, note, strictly
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.engine.phase_runner import PhaseRunner
from fedray.engine.process import describe
from fedray.engine.rehearsal import Rehearsed, rehearsed
from fedray.engine.tasks import EvalResult, EvalTask, PhaseResult, PhaseTask, ScoreResult, Task


class Worker:
    """Does any task of a run for ``clients``, on their device."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.experiment, self.data = clients, clients.experiment, clients.data
        self.phases, self.evaluator = PhaseRunner(clients), Evaluator(clients)
        self.rehearsed = rehearsed(clients, self.evaluator)

    def run(
        self, task: Task, following: Task | None = None, settled: bool = True
    ) -> PhaseResult | EvalResult | ScoreResult:
        """Returns the result of ``task``. If the task ``following`` is known to come next, what it needs is read
        meanwhile. The files of clients' new states are there, unless ``settled`` is false; then they are there after
        :meth:`settle`."""
        if self.rehearsed.strict:
            try:
                with strictly():
                    return self._done(task, following, settled)
            except RuntimeError as error:
                if not is_refused(error):
                    raise
            # an operation of which the rehearsal knew nothing; a task depends on nothing but itself
            self.rehearsed = Rehearsed((FLASH,))
            note(FLASH)
        return self._done(task, following, settled)

    def describe(self) -> dict[str, Any]:
        """Describes what does the tasks: everything on which the bits of their results depend, and what was found
        ``nondeterministic`` before the first of them."""
        return describe(self.clients.device.type) | {"nondeterministic": self.rehearsed.operations}

    def _done(self, task: Task, following: Task | None, settled: bool) -> PhaseResult | EvalResult | ScoreResult:
        result: PhaseResult | EvalResult | ScoreResult
        clock = self.clients.clock
        with clock.on("algorithm" if isinstance(task, PhaseTask) else "evaluation"):
            if isinstance(task, PhaseTask):
                result = self.phases.run(task, following if isinstance(following, PhaseTask) else None)
            elif isinstance(task, EvalTask):
                result = self.evaluator.evaluate(task)
            else:
                result = self.evaluator.score(task)
            if settled:
                with clock.on("transport"):
                    self.settle()
        result.seconds, result.nondeterministic = clock.take(), nondeterministic_operations()
        return result

    def settle(self) -> None:
        """Waits until what the tasks so far have kept is in its files. Raises :class:`~fedray.errors.UserError` if that
        can't be."""
        self.clients.traffic.settle()

    def draw_inputs(self, server: ServerState, size: int, source: str) -> Any:
        """Returns a batch of ``size`` inputs of the set ``source`` (public or test), drawn again in each round.

        A set that is smaller is taken whole.
        """
        samples = self.clients.train if source == "public" else self.clients.test
        indices = self.data.public if source == "public" else np.arange(len(self.data.y_test))
        if size < len(indices):
            rng = stream(server.seed, Purpose.PROBE, server.round)
            indices = np.sort(rng.choice(indices, size, replace=False))
        return samples.gather(indices)[0]

    def cohort_as_stack(self, server: ServerState, broadcast: Broadcast) -> ClientPhase:
        """Returns all clients of the round's cohort as one stack, which has received ``broadcast``."""
        cohort = server.cohort
        indices = [self.data.client(client) for client in cohort.ids]
        stack = Stack(cohort.ids, indices, cohort.steps, cohort.weights, cohort.gaps, scalars=broadcast.scalars)
        # a clock of its own, because the time counts as the server's and not as that of a task
        received = {"shared": broadcast.shared, "members": len(cohort.ids)}
        return self.clients.phase_of(stack, None, round=server.round, lr=server.lr, clock=Clock(), **received)

    def server_as_client(self, server: ServerState, steps: int) -> ClientPhase:
        """Returns the server as a client whose data is the public set, of which it takes ``steps`` batches."""
        stack = Stack([SERVER], [self.data.public], [steps], [1.0], [0], purpose=Purpose.REPRESENTATION)
        training = replace(self.experiment.training, local_steps=steps, local_epochs=None)
        # a clock of its own, because the time counts as the server's and not as that of a task
        own = {"shared": server.vectors, "clock": Clock()}
        return self.clients.phase_of(stack, training, round=server.round, lr=server.lr, **own)
