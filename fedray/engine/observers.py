"""The observers of a run, which evaluate, record and save its rounds. Each observer sees every finished round,
independently of the others.

A round may still be evaluated while the next round trains. So an observer sees each round twice: after its training,
and after its evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedray.core.vectors import Layout, Model
from fedray.engine.pool import Pool
from fedray.engine.profile import Profile
from fedray.engine.round import RoundResult
from fedray.engine.state import checkpoint as checkpoints
from fedray.engine.state.run import RunState
from fedray.engine.virtual_time import add_costs
from fedray.experiment.experiment import Experiment
from fedray.tracking.columns import DIAGNOSTICS
from fedray.tracking.costs import bytes_per_client, flops_of_round, of_choosing
from fedray.tracking.diagnostics import Measured
from fedray.tracking.folder import LOCAL
from fedray.tracking.recorder import Recorder
from fedray.tracking.records import KEY
from fedray.util.files import room_for
from fedray.warning import WARNING

if TYPE_CHECKING:
    import pandas as pd


class Observer:
    """The base class of observers, which see each finished round of a run in order to evaluate, record or save it. Its
    methods do nothing."""

    def trained(self, result: RoundResult) -> None:
        """Called after the training of a round. ``result`` is the round's result so far; the round may not be evaluated
        yet. The run's state is the state after this round."""

    def evaluated(self, result: RoundResult) -> None:
        """Called after the evaluation of a round, when its ``result`` also has the columns of the evaluation in
        ``result.metrics``. The run's state may already belong to the next round, unless :meth:`needs_state_after`
        returned true for the evaluated round."""

    def needs_state_after(self, number: int) -> bool:
        """Returns whether the next round may begin only after :meth:`evaluated` was called for round ``number``,
        because the observer then uses the run's state after this round."""
        return False


class Costs(Observer):
    """Adds up what the rounds so far would have cost if they had not been simulated, and writes the totals into columns
    of metrics.csv: ``iterations`` (the local steps of the client that makes the most of them in a round),
    ``bytes_down`` and ``bytes_up`` (received and sent by all clients) and ``flops`` (of clients and server), and with a
    virtual clock ``virtual_seconds`` and ``joules``."""

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        self.state, self.experiment = state, experiment

    def trained(self, result: RoundResult) -> None:
        experiment, cohort, costs = self.experiment, result.cohort, self.state.costs
        facts = experiment.facts_in(self.state.server.round)
        down, up = bytes_per_client(experiment.algorithm.traffic, facts, experiment.upload)
        choosing = of_choosing(experiment.selection.asks, facts, self.state.sizes, result.candidates)
        for name, cost in zip(("bytes_down", "bytes_up", "flops"), choosing, strict=True):
            costs[name] += cost
        if cohort.ids:
            costs["iterations"] += max(cohort.steps)
            costs["bytes_down"] += down * len(cohort.ids)
            costs["bytes_up"] += up * len(cohort.ids)
            costs["flops"] += flops_of_round(experiment.algorithm, self.state.server, experiment.facts, result.samples)
        if result.asked is not None:
            add_costs(costs, result.asked)
        result.metrics |= costs


class Diagnostics(Observer):
    """With ``run.diagnostics``, adds to the result of each round how far the clients' models drift apart (columns of
    metrics.csv), and how much each layer of the server's model changes (layers.parquet)."""

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        self.state, self.algorithm = state, experiment.algorithm

    def trained(self, result: RoundResult) -> None:
        if not isinstance(self.algorithm, Measured) or not result.cohort.ids:
            return
        for name in DIAGNOSTICS:
            result.metrics[name] = math.fsum(result.log[name]) / len(result.log[name])
        after, before = self.state.server["x"].parameters, self.algorithm.sent.parameters
        slots = self.state.layout.slots
        update = after - before
        result.metrics["update_norm"] = float(torch.linalg.vector_norm(update))
        result.layers = {
            "round": result.number,
            "layer": [slot.name for slot in slots],
            "update_norm": [float(torch.linalg.vector_norm(slot.view(update))) for slot in slots],
            "norm": [float(torch.linalg.vector_norm(slot.view(after))) for slot in slots],
        }


class Records(Observer):
    """Passes the results of each round to ``recorder``, which writes them to the files of the run folder.
    ``wall_seconds()`` returns the seconds that the run has taken so far."""

    def __init__(self, recorder: Recorder, wall_seconds: Callable[[], float]) -> None:
        self.recorder, self.wall_seconds = recorder, wall_seconds

    def evaluated(self, result: RoundResult) -> None:
        result.metrics["wall_seconds"] = self.wall_seconds()
        if result.scores is not None:
            self.recorder.scores(result.scores)
        if result.layers is not None:
            self.recorder.layers(result.layers)
        self.recorder.round(result.metrics, result.log)
        self.recorder.profile(result.number, result.profile)


class Checkpoints(Observer):
    """Writes a checkpoint every ``run.checkpoint_every`` rounds. :meth:`save` writes one at any other time, such as at
    the end of the run. ``saved_round`` is the round of the last checkpoint, and ``saved_at`` the time when it was
    written, by ``time.monotonic()``.

    ``pool`` puts the clients' states into the checkpoint, ``recorder`` writes the run folder, ``profile`` measures the
    time that checkpoints take, and ``wall_seconds()`` returns the seconds that the run has taken so far.
    """

    def __init__(
        self,
        state: RunState,
        pool: Pool,
        recorder: Recorder,
        experiment: Experiment,
        profile: Profile,
        wall_seconds: Callable[[], float],
    ) -> None:
        self.state, self.pool, self.recorder, self.experiment = state, pool, recorder, experiment
        self.profile, self.wall_seconds = profile, wall_seconds
        self.saved_round, self.saved_at = state.server.round, time.monotonic()

    def needs_state_after(self, number: int) -> bool:
        every = self.experiment.config.run.checkpoint_every
        return bool(every) and number % every == 0 and number < self.experiment.rounds

    def evaluated(self, result: RoundResult) -> None:
        if self.needs_state_after(result.number) and not result.diverged:
            with self.profile.measure("checkpoint"):
                self.save()

    def save(self, pin: bool = False) -> None:
        """Writes a checkpoint of the last round, unless there already is one. Before that, the rows of metrics.csv and
        of the other records so far are flushed to disk. With ``pin`` it stays when further ones are written."""
        state, number = self.state, self.state.server.round
        if self.saved_round != number:
            self._write(state, number)
        if pin:
            checkpoints.pin(self.recorder.folder.checkpoints, number)

    def _write(self, state: RunState, number: int) -> None:
        self.recorder.sync()
        earlier = {seen: f"model-{seen}" for seen in state.earlier.handles}
        handles = {file.name: file for file in state.clients.values()}
        handles |= {name: state.earlier.handles[seen] for seen, name in earlier.items()}
        folder = self.recorder.folder.checkpoints
        with room_for(folder):
            checkpoints.save(
                folder,
                number,
                state.vectors(),
                {**state.record(), "wall_seconds": self.wall_seconds(), KEY: self.recorder.digests()},
                states={client: state.clients[client].name for client in sorted(state.clients)},
                past=earlier,
                store=lambda name, path: self.pool.store(handles[name], path),
                keep=self.experiment.config.run.keep_checkpoints,
            )
        self.saved_round, self.saved_at = number, time.monotonic()


class LocalModels(Observer):
    """Writes the models of the clients ``run.local_models_of`` in the rounds ``run.local_models_in``, as they are after
    local training, to the folder ``local`` of the run folder. ``save(model, file name)`` writes a model. If a client
    has no model in such a round, ``tell(line)`` shows a warning to the user."""

    def __init__(
        self,
        experiment: Experiment,
        layout: Layout,
        save: Callable[[Model, str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.experiment, self.layout, self.save, self.tell = experiment, layout, save, tell

    def trained(self, result: RoundResult) -> None:
        run = self.experiment.config.run
        if result.number not in run.local_models_in:
            return
        for client in run.local_models_of:
            name = f"{LOCAL}/round-{result.number:08}/client-{client}.safetensors"
            if client in result.models:
                self.save(self.layout.model(torch.from_numpy(result.models[client])), name)
            else:
                why = f"client {client} trained no model that began with round {result.number}"
                self.tell(f"{WARNING}{name} was not written: {why}")


class Best(Observer):
    """Follows the task's main metric over the evaluated rounds, to save the best model and to end the run early: on the
    validation set if there is one, so that the test set decides nothing.

    With ``run.save_best``, ``save(file name)`` is called after each round in which the metric is better than in all
    rounds before, to save the evaluated model. ``reason`` is None until the run must end. Then it is "run.stop_at" if
    the metric has reached the value of this setting (or a column that it names has), or "run.patience" if the metric
    has not improved for as many rounds as this setting says.
    """

    FILE = "model-best.safetensors"

    def __init__(self, experiment: Experiment, save: Callable[[str], None]) -> None:
        self.experiment, self.run, self.save = experiment, experiment.config.run, save
        part = "validation" if experiment.config.data.validation_samples else "test"
        self.column = f"{part}_{experiment.task.main}"
        self.value, self.round = math.nan, 0
        stop_at = self.run.stop_at
        self._stop_at = {} if stop_at is None else stop_at if isinstance(stop_at, dict) else {self.column: stop_at}
        self.reason: str | None = None

    @property
    def _acts(self) -> bool:
        return self.run.save_best or self.run.stop_at is not None or self.run.patience is not None

    def needs_state_after(self, number: int) -> bool:
        every = self.run.eval_every
        return self._acts and (number == self.experiment.rounds or (bool(every) and number % every == 0))

    def evaluated(self, result: RoundResult) -> None:
        if not result.diverged and self._follow(result.number, result.metrics) and self.run.save_best:
            self.save(self.FILE)

    def restore(self, metrics: pd.DataFrame) -> None:
        """Follows the rows of metrics.csv, ``metrics``, so that a run that continues from a checkpoint compares its
        further rounds with the best so far, or ends at once if it had to end there."""
        for row in metrics.to_dict("records"):
            self._follow(int(row["round"]), {str(key): value for key, value in row.items()})

    def _follow(self, number: int, row: Mapping[str, Any]) -> bool:
        """Takes the ``row`` of metrics.csv of round ``number``, decides whether the run must end, and returns whether
        the main metric is better than in all rounds before."""
        value = float(row.get(self.column, math.nan))
        # what was the last round is evaluated, although a longer run would not do that
        if math.isnan(value) and not self.experiment.is_evaluated(number):
            return False
        better = value < self.value if self.experiment.task.mode == "min" else value > self.value
        better = better or (math.isnan(self.value) and not math.isnan(value))
        if better:
            self.value, self.round = value, number
        if any(self._reached(column, wanted, row) for column, wanted in self._stop_at.items()):
            self.reason = "run.stop_at"
        elif self.run.patience is not None and number - self.round >= self.run.patience:
            self.reason = "run.patience"
        else:
            self.reason = None
        return better

    def _reached(self, column: str, wanted: float, row: Mapping[str, Any]) -> bool:
        """Returns whether a column of metrics.csv is at least what is ``wanted``, or at most if less is better."""
        value, (_, _, metric) = row.get(column, math.nan), column.partition("_")
        known = self.experiment.task.metrics.get(metric)
        less = metric == "loss" or (known is not None and known.mode == "min")
        return bool(value <= wanted if less else value >= wanted)
