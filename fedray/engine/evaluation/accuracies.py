"""Evaluates the models at the end of a round: cuts the evaluation into tasks for the workers, and adds up the
results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedray.data.federated import FederatedData
from fedray.engine.evaluation.client_scores import ClientScores, Scoring
from fedray.engine.observers import Observer
from fedray.engine.pool import Pool
from fedray.engine.round import RoundResult
from fedray.engine.server_rules import eval_model, further_models
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.tasks import GLOBAL, LOCAL_PREFIX, PERSONAL_PREFIX, EvalResult, EvalTask, ScoreTask, TaskResult
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.experiment.recorded import LOCAL, recorded_metrics
from fedray.robust.attack import Attack
from fedray.tracking.columns import DIAGNOSTICS, METRICS
from fedray.warning import WARNING

EVAL_BLOCK = 1000
"""The number of samples in an evaluation task. It is fixed, so that the sums of losses and metrics do not depend on the
number of workers."""

RESERVED = frozenset(
    {"test", "validation", "train", "global", "local", "personal", "personalized", "finetuned", "backdoor"}
)
"""Names that an algorithm's further model can't have, because other columns of metrics.csv begin with these names."""


class Accuracies(Observer):
    """An observer that starts an evaluation of the current models every ``run.eval_every`` rounds and after the last
    round. ``queue`` sends the tasks of the evaluation to the workers; the next round need not wait for them."""

    def __init__(
        self, state: RunState, experiment: Experiment, scoring: Scoring, data: FederatedData, queue: TaskQueue
    ) -> None:
        self.state, self.experiment, self.scoring, self.data, self.queue = state, experiment, scoring, data, queue

    def trained(self, result: RoundResult) -> None:
        if self.experiment.is_evaluated(result.number) or result.is_last:
            if self.experiment.evaluates_local_models(result.number) and result.cohort.ids and not result.models:
                line = f"{WARNING}run.eval_local_models: {type(self.experiment.algorithm).__name__} trains no models"
                self.queue.note(TaskResult(lines=(line,)))
            evaluation = Evaluation(self.experiment, self.scoring, self.state, self.data, self.queue.pool, result)
            self.queue.later(evaluation.tasks, evaluation.take)


class Evaluation:
    """One evaluation of the models after a round. The workers may do its ``tasks`` at any time and in any order.
    :meth:`take` must be called with the result of each.

    After the last result, the evaluation sets ``scores`` of ``round``, the result of the round, and adds its values to
    ``round.metrics``. Until then the clients' states must not be deleted. ``scoring`` says which clients are scored on
    their own test samples. ``pool`` sends the models to the workers. With ``run.eval_test=false`` the test set is not
    evaluated.
    """

    def __init__(
        self,
        experiment: Experiment,
        scoring: Scoring,
        state: RunState,
        data: FederatedData,
        pool: Pool,
        round: RoundResult,
    ) -> None:
        self.round, server, algorithm = round, state.server, experiment.algorithm
        self.task = experiment.task
        further = further_models(algorithm, server)
        models = {GLOBAL: eval_model(algorithm, server), **further}
        attack = _measured_attack(experiment)
        local = round.models if experiment.evaluates_local_models(round.number) else {}
        self.local = {
            f"{LOCAL_PREFIX}{client}": state.layout.model(torch.from_numpy(local[client])) for client in sorted(local)
        }
        self.splits = {
            "test": (len(data.y_test) if experiment.config.run.eval_test else 0, [*models, *self.local]),
            "validation": (len(data.validation), [GLOBAL]),
            "train": (len(data.train_subset), [GLOBAL]),
            "backdoor": (0 if attack is None else len(attack.victims()), [GLOBAL]),
        }
        self.scores = ClientScores(scoring, experiment, server, data, list(further))
        personal = {PERSONAL_PREFIX + name: value for name, value in self.scores.broadcast.shared.items()}
        handle = pool.publish({**models, **personal, **self.local})
        self.tasks: list[EvalTask | ScoreTask] = _blocks(handle, self.splits, scoring.wanted)
        self.tasks += self.scores.tasks(handle, state.clients, pool.slots)
        self.found: dict[tuple[str, int], EvalResult] = {}
        self.left = len(self.tasks)
        if not self.left:
            self._complete()

    def take(self, task: EvalTask | ScoreTask, result: Any) -> None:
        """Stores the ``result`` of ``task``, one of the evaluation's tasks, until all results are there. The last one
        completes the evaluation: its values are added to the result of the round."""
        if isinstance(task, ScoreTask):
            self.scores.take(task, result)
        else:
            self.found[task.split, task.start] = result
        self.left -= 1
        if not self.left:
            self._complete()

    def _complete(self) -> None:
        self.round.metrics |= self.row()
        self.round.scores = self.scores.rows()

    def row(self) -> dict[str, float]:
        """Returns what the evaluation adds to the round's row of metrics.csv, as values by column. All results must
        have been taken.

        The columns are metrics of the evaluated model on each split (``test_loss``, ``validation_accuracy``), metrics
        of the further models on the test set (``<model>_accuracy``), means of the metrics of the cohort's local models
        on it (``local_accuracy``), and means of the scores of single clients.
        """
        row: dict[str, float] = {}
        of_local: list[dict[str, float]] = []
        for split, (samples, names) in self.splits.items():
            if not samples:
                continue
            found = [self.found[split, start] for start in range(0, samples, EVAL_BLOCK)]
            for position, name in enumerate(names):
                values = self._values([result.sums[position] for result in found])
                if name in self.local:
                    of_local.append(values)
                    continue
                if split == "test" and self.scores.scoring.wanted:
                    self.scores.take_each(name, np.concatenate([result.each[position] for result in found]))
                label = split if name == GLOBAL else name
                row |= {f"{label}_{metric}": values[metric] for metric in recorded_metrics(self.task, label)}
        return row | self._means(of_local) | self.scores.row()

    def _means(self, of_local: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the columns with the means of the metrics of local models; there are none if no round has them."""
        if not of_local:
            return {}
        return {
            f"{LOCAL}_{metric}": math.fsum(values[metric] for values in of_local) / len(of_local)
            for metric in recorded_metrics(self.task, LOCAL)
        }

    def _values(self, blocks: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
        """Returns the loss and each metric of a model, by name, from the sums of its ``blocks`` of samples."""
        return {
            name: self.task.value(name, *(math.fsum(block[name][place] for block in blocks) for place in (0, 1)))
            for name in blocks[0]
        }


def further_columns(experiment: Experiment, scoring: Scoring, further: Sequence[str]) -> list[str]:
    """Returns the names of the columns of metrics.csv that not every run has: the user's metrics, the metrics of the
    algorithm's further models (``further`` has the names of these models), scores on clients' test samples,
    diagnostics, and privacy.

    Raises :class:`UserError` if a further model has a reserved name (:data:`RESERVED`).
    """
    for name in further:
        if name in RESERVED:
            raise UserError(
                f"algorithm.name={experiment.config.algorithm.name}: a further model can't be called {name!r}, "
                "as fedray has columns of that name; call it otherwise"
            )
    config = experiment.config
    splits = {"test": True, "validation": config.data.validation_samples, "train": config.run.eval_train_samples}
    splits["backdoor"] = _measured_attack(experiment) is not None
    labels = [*(label for label, there in splits.items() if there), *further]
    wanted = [f"{label}_{metric}" for label in labels for metric in recorded_metrics(experiment.task, label)]
    if experiment.evaluates_local_models(experiment.rounds):
        wanted += [f"{LOCAL}_{metric}" for metric in recorded_metrics(experiment.task, LOCAL)]
    wanted += scoring.columns(further)
    if config.run.diagnostics:
        wanted += [*DIAGNOSTICS, "update_norm"]
    if config.run.diagnostics == "virtual":
        wanted.append("virtual_distance")
    if config.run.diagnostics == "all_clients":
        wanted += ["cohort_error", *(["momentum_error"] if experiment.algorithm.momentum_window else [])]
    if config.system.is_on:
        wanted.append("joules")
    if experiment.privacy is not None:
        wanted += ["clip_norm", "epsilon"]
    return [name for name in wanted if name not in METRICS]


def _measured_attack(experiment: Experiment) -> Attack | None:
    """Returns the attack whose success on test samples is measured, None if there is none."""
    attack = None if experiment.robust is None else experiment.robust.attack
    measured = attack is not None and attack.has_victims() and experiment.config.run.eval_test
    return attack if measured else None


def _blocks(
    handle: object, splits: Mapping[str, tuple[int, Sequence[str]]], each_test: bool
) -> list[EvalTask | ScoreTask]:
    return [
        EvalTask(handle, names, split, start, min(start + EVAL_BLOCK, samples), each_test and split == "test")
        for split, (samples, names) in splits.items()
        for start in range(0, samples, EVAL_BLOCK)
    ]
