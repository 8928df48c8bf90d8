"""A worker, which does the tasks of a run. A task depends on no state of a worker, so any worker can do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedray.algorithms.base import Broadcast
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase, Stack
from fedray.core.seeds import SERVER, Purpose, drawn_by, stream
from fedray.core.stopwatch import Stopwatch
from fedray.engine.clients import Clients
from fedray.engine.determinism import FLASH, is_refused, nondeterministic_operations, note, strictly
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.engine.phase_runner import PhaseRunner
from fedray.engine.process import describe
from fedray.engine.rehearsal import Rehearsed, rehearsed
from fedray.engine.tasks import EvalTask, PhaseTask, Task, TaskResult
from fedray.warning import WARNING


class Worker:
    """Does the tasks of a run in one process: trains clients, evaluates models and scores clients. ``clients`` has the
    network, the data and the clients' states, on the device that computes. Any worker can do any task of the run."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self.experiment, self.data = clients, clients.experiment, clients.data
        self.phases, self.evaluator = PhaseRunner(clients), Evaluator(clients)
        self.rehearsed = rehearsed(clients, self.evaluator)

    def run(self, task: Task, following: Task | None = None, settled: bool = True) -> TaskResult:
        """Does ``task`` and returns its result.

        ``following`` is the next task, if it is known: the states of its clients are read from files while ``task`` is
        done. With ``settled`` the files with the clients' new states are complete when this method returns. Without it,
        they are complete only after :meth:`settle`.
        """
        if self.rehearsed.strict:
            try:
                with strictly():
                    return self._done(task, following, settled)
            except RuntimeError as error:
                if not is_refused(error):
                    raise
            # the rehearsal missed an operation; the whole task can be repeated, because it depends only on itself
            self.rehearsed = Rehearsed((FLASH,))
            note(FLASH)
        return self._done(task, following, settled)

    def describe(self) -> dict[str, Any]:
        """Returns a description of this process as a dict. ``node`` is the name of the machine, and ``pid`` the id of
        the process. The bits of results depend on ``device`` (the model of the GPU or CPU), ``instructions`` (the CPU's
        instruction set; empty for a GPU) and ``torch`` (its version). ``nondeterministic`` has the names of the model's
        operations without a deterministic version that were found before the first round."""
        return describe(self.clients.device.type) | {"nondeterministic": self.rehearsed.operations}

    def _done(self, task: Task, following: Task | None, settled: bool) -> TaskResult:
        stopwatch = self.clients.stopwatch
        with stopwatch.on("algorithm" if isinstance(task, PhaseTask) else "evaluation"):
            do = self._watched if self.clients.user_defined else self._result
            result = do(task, following)
            if settled:
                with stopwatch.on("transport"):
                    self.settle()
        result.seconds, result.nondeterministic = stopwatch.take(), nondeterministic_operations()
        result.lines = self.clients.take_lines()
        return result

    def _result(self, task: Task, following: Task | None) -> TaskResult:
        if isinstance(task, PhaseTask):
            return self.phases.run(task, following if isinstance(following, PhaseTask) else None)
        return self.evaluator.evaluate(task) if isinstance(task, EvalTask) else self.evaluator.score(task)

    def _watched(self, task: Task, following: Task | None) -> TaskResult:
        """Returns the result of a task in which user-defined code runs, and tells the user if the code draws random
        numbers that would be others in another run."""
        results: list[TaskResult] = []
        if drawn := drawn_by(lambda: results.append(self._result(task, following))):
            self.clients.say(
                f"{WARNING}user-defined code has drawn random numbers from the global generator of "
                f"{' and of '.join(sorted(drawn))}, which fedray has not seeded for it, so another run may draw "
                "others: an algorithm must draw from client.generator(row), a step of train.upload from "
                "upload.generator(row), an attack from run.generator() before the run, and a model from torch's "
                "generator, or from any in its first forward pass"
            )
        return results[0]

    def settle(self) -> None:
        """Waits until the clients' new states, of all tasks so far, are in their files. Raises
        :class:`~fedray.errors.UserError` if a state can't be written."""
        self.clients.traffic.settle()

    def draw_inputs(self, server: ServerState, size: int, source: str) -> Any:
        """Draws ``size`` inputs of samples, without their targets, on which the algorithm's server can run models, and
        returns them, ``[size, ...]``. ``source`` is the set from which they are drawn, without replacement: "public"
        for the public set, or "test" for the test set. The draws of different rounds are independent.

        If the set is smaller, all of its inputs are returned.
        """
        samples = self.clients.train if source == "public" else self.clients.test
        indices = self.data.public if source == "public" else np.arange(len(self.data.y_test))
        if size < len(indices):
            rng = stream(server.seed, Purpose.PROBE, server.round)
            indices = np.sort(rng.choice(indices, size, replace=False))
        return samples.gather(indices)[0]

    def cohort_as_stack(self, server: ServerState, broadcast: Broadcast) -> ClientPhase:
        """Returns all clients of the round's cohort as one stack, the form in which an algorithm trains clients
        together, after they have received ``broadcast`` from the server. ``server`` has the cohort and the round.

        It is for ``run.diagnostics=virtual``, which trains a virtual model, one model for all of these clients, in the
        server's process.
        """
        cohort = server.cohort
        indices = [self.data.client(client) for client in cohort.ids]
        stack = Stack(cohort.ids, indices, cohort.steps, cohort.weights, cohort.gaps, scalars=broadcast.scalars)
        # a stopwatch of its own, because the time counts as the server's and not as that of a task
        received = {"shared": broadcast.shared, "members": len(cohort.ids)}
        return self.clients.phase_of(stack, None, round=server.round, lr=server.lr, stopwatch=Stopwatch(), **received)

    def server_as_client(self, server: ServerState, steps: int) -> ClientPhase:
        """Returns the server as a client, for algorithms in which the server trains a model as well. The samples of
        this client are the public set. It makes ``steps`` local steps, at the learning rate of the current round of
        ``server``."""
        stack = Stack([SERVER], [self.data.public], [steps], [1.0], [0], purpose=Purpose.REPRESENTATION)
        training = replace(self.experiment.training, local_steps=steps, local_epochs=None)
        # a stopwatch of its own, because the time counts as the server's and not as that of a task
        own = {"shared": server.vectors, "stopwatch": Stopwatch()}
        return self.clients.phase_of(stack, training, round=server.round, lr=server.lr, **own)
