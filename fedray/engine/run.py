"""Runs one round of a run after another, and shows each to the observers, which evaluate, record and save it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedray.core.batches import steps_of
from fedray.core.places import Places
from fedray.core.vectors import Model
from fedray.data.federated import FederatedData
from fedray.engine.asynchronous import asynchronous_of
from fedray.engine.callbacks import Report
from fedray.engine.cutting import TaskCutter
from fedray.engine.determinism import nondeterministic_operations
from fedray.engine.driver import Order
from fedray.engine.evaluation.accuracies import Accuracies
from fedray.engine.evaluation.client_scores import Scoring
from fedray.engine.evaluation.personal_models import make_personal_models
from fedray.engine.observers import Best, Checkpoints, Costs, Diagnostics, LocalModels, Records
from fedray.engine.pool import Pool
from fedray.engine.privacy import privacy_spent
from fedray.engine.profile import Profile
from fedray.engine.round import RoundResult, run_round
from fedray.engine.server_rules import eval_model, further_models
from fedray.engine.state.checkpoint import Checkpoint, flat_sha256
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import TaskResult
from fedray.engine.virtual_time import VirtualTime, rows_of
from fedray.engine.worker import Worker
from fedray.errors import UserError, near_miss
from fedray.experiment.experiment import Experiment
from fedray.experiment.system import clock_of
from fedray.tracking.folder import PERSONAL
from fedray.tracking.recorder import Recorder
from fedray.tracking.tables import read_metrics
from fedray.util.files import replacement_of
from fedray.warning import WARNING


class Run:
    """Carries out a run of ``experiment`` on ``data``. A call of :meth:`rounds` trains, evaluates and records the
    rounds that follow ``state``. The class is the same for all engines, which differ in their ``pool``. If the
    attribute ``stopping``, an event, is set, the run ends after the round in progress.

    Args:
        worker: The server's own worker (the object that trains and evaluates in a process), with a network and the
            data.
        pool: The workers that simulate the clients.
        state: What changes from round to round: the states of the server and of the clients, and the costs so far.
        scoring: Decides which clients are scored on their test samples, and with which models.
        recorder: Writes the files of the run folder.
        concurrent: Whether the server trains a model of its own while the clients train.
        overlap: Whether a round is evaluated while the next one begins to train.
        say: ``say(line)`` shows a line to the user.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: FederatedData,
        worker: Worker,
        pool: Pool,
        state: RunState,
        scoring: Scoring,
        recorder: Recorder,
        concurrent: bool,
        overlap: bool,
        say: Callable[[str], None],
    ) -> None:
        self.experiment, self.data, self.worker, self.pool = experiment, data, worker, pool
        self.state, self.recorder, self._say = state, recorder, say
        self._said: set[str] = set()
        self.stopping = threading.Event()
        self.profile = Profile()
        self._wall_before, self._began = 0.0, time.perf_counter()
        self._halted: float | None = None
        self.queue = TaskQueue(pool, self.profile, self._note, concurrent, overlap)
        chunk = experiment.chunk
        self.cutter = TaskCutter(pool, experiment.training, chunk, state.layout.row_width, experiment.lanes)
        self.virtual_time = VirtualTime(clock_of(experiment, data), experiment, state)
        self.asynchronous = asynchronous_of(experiment, data, state)
        self.checkpoints = Checkpoints(state, pool, recorder, experiment, self.profile, self.wall_seconds)
        self.best = Best(experiment, self._save_model)
        local_models = LocalModels(experiment, state.layout, self._save, self._tell)
        self.observers = (
            Costs(state, experiment),
            Diagnostics(state, experiment),
            Accuracies(state, experiment, scoring, data, self.queue),
            Records(recorder, self.wall_seconds),
            local_models,
            self.best,
            self.checkpoints,
        )
        self._unreported: list[RoundResult] = []
        self._reported: RoundResult | None = None
        self._is_over = False

    def restore(self, saved: Checkpoint) -> None:
        """Goes back to ``saved``, a checkpoint of this run, so that :meth:`rounds` continues after the checkpoint's
        round."""
        self.state.restore(saved, self.pool, self.worker.clients.states)
        self.checkpoints.saved_round = saved.round
        self.best.restore(read_metrics(self.recorder.folder.path))
        self._wall_before = saved.record["wall_seconds"]

    def obey(self, order: Order) -> None:
        """Notes what the driver wants of the next round, before :meth:`rounds` is asked for it."""
        self.state.order = order
        if order.stop:
            self.stopping.set()

    def _change_by_hand(self, number: int) -> None:
        """Makes the changes of round ``number`` that the driver wants, and notes them, as the configuration does not
        say them."""
        order = self.state.order
        if order.model is not None:
            module = self.experiment.build_model()
            Places(module).load(order.model)
            layout = self.worker.clients.network.layout
            self.state.server.vectors["x"] = layout.model(layout.pack(module).row.to(self.state.device))
        changed = [name for name in ("model", "cohort") if getattr(order, name) is not None]
        if changed:
            self.state.by_hand[number] = changed
            self.recorder.by_hand(self.state.by_hand)
            self.recorder.note(f"round {number}: {' and '.join(changed)} given by hand")

    def wall_seconds(self) -> float:
        """Returns the seconds that the run has taken so far, including the time before it was resumed."""
        return self._wall_before + (self._halted or time.perf_counter()) - self._began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the run waits for an order. If the user steps through the run, this is no time of the
        run's, however long the user thinks."""
        if not self.experiment.stepped:
            yield
            return
        self._halted = time.perf_counter()
        with self.profile.halted():
            yield
        self._began += time.perf_counter() - self._halted
        self._halted = None

    def rounds(self) -> Iterator[Report]:
        """Runs the remaining rounds, and yields a report of each round, whose metrics are then complete.

        A round is reported once it has been evaluated; with ``overlap`` the next round has been trained by then, except
        after the first round, which the user waits for. The run ends early if ``stopping`` is set, if the loss or the
        model is no longer finite, if the main metric is good enough or stops improving (``run.stop_at``,
        ``run.patience``), or if no client can be reached any more (``system.availability``).
        """
        self._began = time.perf_counter()
        self.profile.take()
        status, first = "completed", self.state.server.round + 1
        for number in range(first, self.experiment.rounds + 1):
            if self.best.reason is not None or self._ends_before(number, self.state.costs.get("virtual_seconds", 0.0)):
                break
            if self.stopping.is_set():
                status = "interrupted"
                break
            result = self._round(number)
            result.profile = self.profile.take()
            # in a round without clients workers had nothing to do, so that the evaluation before it is not done yet
            self._finish_queue()
            yield from self._reports()
            result.log = self._facts(result.number, result.cohort.ids, result.cohort.steps) | result.log
            self._observe(result, at_once=number == first)
            if self.queue.finished:
                yield from self._reports()
            if result.diverged:
                status = "diverged"
                break
        self._finish_queue()
        yield from self._reports()
        if self.experiment.config.run.checkpoint_every and status != "diverged" and self.state.server.round:
            self.checkpoints.save()
        self._finish(status)

    def _round(self, number: int) -> RoundResult:
        self._change_by_hand(number)
        if self.asynchronous is not None:
            result = self.asynchronous.run(number, self.cutter, self.queue)
        else:
            result = run_round(number, self.state, self.experiment, self.cutter, self.queue, self.virtual_time)
        if result.asked is not None and number < self.experiment.rounds:
            after = self.state.costs.get("virtual_seconds", 0.0) + result.asked.duration
            result.is_last = self._ends_before(number + 1, after)
        return result

    def _ends_before(self, number: int, seconds: float) -> bool:
        """Returns whether no client can be reached any more when round ``number`` would begin, after so many virtual
        ``seconds``, and tells the user once if so."""
        if self._is_over:
            return True
        over = self.asynchronous is not None and not self.asynchronous.schedule.has(number)
        self._is_over = over or self.virtual_time.is_over(seconds)
        if self._is_over and number == 1:
            raise UserError("system.availability: no client can be reached for as long as it needs to answer")
        if self._is_over:
            self._tell(
                f"{WARNING}after round {number - 1} no client can be reached any more (system.availability): the run "
                "ends"
            )
        return self._is_over

    def _observe(self, result: RoundResult, at_once: bool) -> None:
        """Shows a round to the observers after its training. With ``at_once``, or if one of them needs the state after
        this round, evaluation tasks that were put off are done now."""
        # in a private run a single client must not decide when it ends
        finite = self.experiment.privacy is not None or math.isfinite(result.metrics.get("train_loss", 0))
        result.diverged = not (finite and self.state.is_finite())
        self._unreported.append(result)
        for observer in self.observers:
            observer.trained(result)
        at_once = at_once or result.is_last
        if at_once or result.diverged or any(observer.needs_state_after(result.number) for observer in self.observers):
            self.queue.finish()
        if self.queue.finished:
            self._add_profile(result)

    def _note(self, found: TaskResult) -> None:
        """Passes on what a worker's result ``found`` contains for the user and the run's records: its lines, and
        operations that are not deterministic. A line that several workers send is shown once."""
        self.recorder.withdraw_promise(found.nondeterministic)
        for line in found.lines:
            if line not in self._said:
                self._said.add(line)
                self.recorder.note(line)
                self._say(line)

    def _facts(self, number: int, ids: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
        """Returns the columns of clients.parquet that runs of all algorithms have, by name, for the clients ``ids``,
        which make ``steps`` local steps in round ``number``."""
        return {
            "round": number,
            "client": list(ids),
            **self.data.names_of(ids),
            "samples": [int(self.state.sizes[client]) for client in ids],
            "steps": list(steps),
        }

    def _facts_of_asked(self, number: int, ids: Sequence[int], trained: Sequence[int]) -> dict[str, Any]:
        local = self.experiment.training
        steps = [
            has * steps_of(int(self.state.sizes[client]), local.batch_size, local.local_steps, local.local_epochs)
            for client, has in zip(ids, trained, strict=True)
        ]
        return self._facts(number, ids, steps)

    def _finish_queue(self) -> None:
        if not self.queue.finished:
            self.queue.finish()
            self._add_profile(self._unreported[-1])

    def _add_profile(self, result: RoundResult) -> None:
        for purpose, seconds in self.profile.take().items():
            result.profile[purpose] += seconds

    def _reports(self) -> Iterator[Report]:
        """Shows all rounds whose evaluation has ended to the observers, and yields the reports of these rounds."""
        while self._unreported:
            result = self._unreported.pop(0)
            if result.asked is not None:
                result.log = rows_of(result.log, result.asked, partial(self._facts_of_asked, result.number))
            for observer in self.observers:
                observer.evaluated(result)
            self._reported = result
            yield Report(result.number, dict(result.metrics))

    def look(self, what: str, name: Any = None) -> Any:
        """Returns a part of the last reported round for the driver. It must be called before the next round begins.

        If ``what`` is "clients", "evaluation" or "layers", the result is the round's part of the table clients.parquet,
        evaluation.parquet or layers.parquet: a dict from the column to its values, or None if the round has no such
        table.

        If ``what`` is "model", the result is a model: a dict from the names of tensors in model.safetensors to copies
        of them on the CPU. ``name`` is then the name of one of the algorithm's further models
        (``Algorithm.further_models``), or None for the evaluated model, which the algorithm would deploy.

        If ``what`` is "client model", it is the model of the client ``name`` after its local training in the round.

        Raises :class:`UserError` if there is no such model. The evaluated model is there before the first round, too.
        """
        result = self._reported
        if what == "client model":
            return self._client_model(result, name)
        if what != "model":
            assert result is not None
            scores = result.scores if result.scores and result.scores["client"] else None
            return {"clients": result.log, "evaluation": scores, "layers": result.layers}[what]
        algorithm, server = self.experiment.algorithm, self.state.server
        models = further_models(algorithm, server)
        if name is not None and name not in models:
            raise UserError(f"{self.experiment.config.algorithm.name} has no model {name!r}{near_miss(name, models)}")
        model = eval_model(algorithm, server) if name is None else models[name]
        return self._on_host(model)

    def _client_model(self, result: RoundResult | None, client: int) -> dict[str, Tensor]:
        if result is None:
            raise UserError("no round has been made yet, so there are no models of clients")
        if client not in result.models:
            when, kept = f"round {result.number}", sorted(result.models)
            has = f"those of {kept}" if kept else "none"
            raise UserError(f"the model of client {client} was not kept ({when} has {has}): keep_clients= names them")
        return self._on_host(self.state.layout.model(torch.from_numpy(result.models[client])))

    def _on_host(self, model: Model) -> dict[str, Tensor]:
        named = self.worker.clients.network.saved(model)
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def save(self) -> None:
        """Writes a checkpoint of the last round, which stays when there are later ones."""
        self.checkpoints.save(pin=True)

    def _tell(self, line: str) -> None:
        self.recorder.note(line)
        self._say(line)

    def _save_model(self, name: str) -> None:
        """Writes the evaluated model into the file ``name`` of the run folder."""
        self._save(eval_model(self.experiment.algorithm, self.state.server), name)

    def _save(self, model: Model, name: str) -> None:
        """Writes ``model`` into the file ``name`` of the run folder, with all tensors of the user's module."""
        named = self.worker.clients.network.saved(model)
        path = self.recorder.folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement_of(path) as staging:
            save_file({name: tensor.cpu().contiguous() for name, tensor in named.items()}, staging)

    def _save_personal_models(self) -> None:
        """Writes the personal models of the clients ``run.personal_models_of``."""
        asked = self.experiment.config.run.personal_models_of
        ids = np.flatnonzero(self.state.sizes).tolist() if asked == "all" else asked
        if ids:
            make_personal_models(
                ids, self.experiment, self.state, self.data, self.queue,
                lambda client, model: self._save(model, f"{PERSONAL}/client-{client}.safetensors"),
            )  # fmt: skip

    def _private_layers(self) -> dict[str, int]:
        """Returns how much of the model stays at each client, for summary.json; nothing if all of it is sent."""
        facts = self.experiment.facts_in(self.state.server.round)
        if not facts.has_private_layers:
            return {}
        return {"private_parameters": facts.private_parameters, "private_buffers": facts.private_buffers}

    def _finish(self, status: str) -> None:
        model, layout = eval_model(self.experiment.algorithm, self.state.server), self.worker.clients.network.layout
        self._save_model("model.safetensors")
        if status != "interrupted":
            self._save_personal_models()
        self.recorder.withdraw_promise(nondeterministic_operations())
        self.recorder.finish(
            status,
            parameters=layout.parameters,
            **self._private_layers(),
            model_sha256=flat_sha256(layout.named(model)),
            partition_hash=self.data.partition_hash,
            **({} if self.data.class_names is None else {"class_names": self.data.class_names}),
            stopped_by=self.best.reason or ("system.availability" if self._is_over else None),
            **privacy_spent(self.experiment, self.state.server.round),
            **({"by_hand": self.state.by_hand} if self.state.by_hand else {}),
        )
