"""Scores models for single clients: computes the task's main metric on each client's test share, the samples of the
test set that serve as this client's test data.

Every model is scored on the same shares, so that the numbers can be compared. The models are the global model, the
algorithm's further models, its personal models, and the global model after some steps of local training on each client.
The global and the further models are the same for all clients. So their scores follow from the evaluation of the whole
test set, and only the models that differ from client to client need further evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Broadcast, Cohort, ServerState
from fedray.client.phase import stacks
from fedray.data.federated import FederatedData
from fedray.data.partitions.test_shares import draw_eval_clients
from fedray.engine.cutting import cut_into_tasks
from fedray.engine.server_rules import personal_broadcast
from fedray.engine.state.states import StateFile
from fedray.engine.tasks import GLOBAL, Handle, ScoreResult, ScoreTask, positions
from fedray.experiment.cohorts import weights_of
from fedray.experiment.experiment import Experiment

CLIENT_MODEL_COLUMNS = {"personal": "personalized", "finetuned": "finetuned"}
"""How columns of metrics.csv begin that have scores of models that differ from client to client: for each kind of model
the first part of ``<first part>_<metric>``. A model that all clients share has the column
``<model>_on_shares_<metric>`` instead."""


OF_CHOSEN = ("mean", "weighted_mean", "worst_tenth", "std")
"""What is computed of the scores of the clients that ``run.eval_clients`` chose: the mean, in which each client counts
the same or as much as its test share has samples, the mean of the worst tenth, and the standard deviation."""


def columns_of_chosen(metric: str, models: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the columns of metrics.csv about the clients that ``run.eval_clients`` chose.

    They are: of the global model and of those of ``models`` that differ from client to client what :data:`OF_CHOSEN`
    says; how many of the clients have a test share (samples of the test set that serve as the client's test data); and
    the number of samples in the smallest of these shares. ``metric`` is the metric of the scores.
    """
    names = [_of_model(model) for model in models if model == GLOBAL or model in CLIENT_MODEL_COLUMNS]
    of_values = (f"clients_{name}{metric}_{what}" for name in names for what in OF_CHOSEN)
    return (*of_values, "clients_with_shares", "clients_least_share")


@dataclass(frozen=True)
class Scoring:
    """Decides which clients are scored at each evaluation of a run, and which models. A score is the value of
    ``metric``, the task's main metric, for a model on a client's test share: the samples of the test set that serve as
    this client's test data.

    ``personal`` says whether the algorithm has personal models. ``finetune_steps`` is the number of local steps by
    which the global model is fine-tuned on each client, or 0. The cohort's clients are scored if there are personal or
    fine-tuned models. The clients ``chosen``, by ``run.eval_clients``, are always scored, in the cohort or not.
    """

    metric: str = "accuracy"
    personal: bool = False
    finetune_steps: int = 0
    chosen: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, experiment: Experiment, data: FederatedData) -> Scoring:
        """Returns the scoring that the configuration of ``experiment`` asks for. With ``run.eval_test=false`` no client
        is scored."""
        run = experiment.config.run
        if not run.eval_test:
            return cls(experiment.task.main)
        chosen = draw_eval_clients(data, experiment.config.data.seed or 0, run.eval_clients)
        personal = experiment.algorithm.has_personal_model() or bool(experiment.private)
        return cls(experiment.task.main, personal, run.finetune_steps, tuple(chosen.tolist()))

    @property
    def wanted(self) -> bool:
        """Whether any client is scored on its test share, so that the run has evaluation.parquet."""
        return self.of_cohort or bool(self.chosen)

    @property
    def of_cohort(self) -> bool:
        """Whether the clients of each cohort are scored, because the run has models that differ from client
        to client."""
        return self.personal or self.finetune_steps > 0

    def models(self, further: Sequence[str]) -> list[str]:
        """Returns the names of all models that are scored: ``global``, the algorithm's further models (``further`` has
        their names), and ``personal`` and ``finetuned`` if the run has such models."""
        own = {"personal": self.personal, "finetuned": self.finetune_steps > 0}
        return [GLOBAL, *further, *(name for name, there in own.items() if there)]

    def columns(self, further: Sequence[str]) -> list[str]:
        """Returns the names of the columns that scoring adds to metrics.csv, such as ``personalized_accuracy`` and
        ``cohort_with_shares``. ``further`` has the names of the algorithm's further models."""
        of_cohort = [_column(name, self.metric) for name in self.models(further)]
        of_cohort += ["cohort_with_shares", "cohort_least_share"]
        return [
            *(of_cohort if self.of_cohort else ()),
            *(columns_of_chosen(self.metric, self.models(further)) if self.chosen else ()),
        ]


class ClientScores:
    """The scores of single clients in the evaluation after one round: the main metric of each model on each client's
    test share, the samples of the test set that serve as this client's test data.

    :meth:`take` must be called with the results of all :meth:`tasks`, and :meth:`take_each` for each model that was
    evaluated on the whole test set. Then :meth:`row` and :meth:`rows` return the columns of metrics.csv and
    evaluation.parquet. ``scoring`` says which clients and models are scored; ``further`` has the names of the
    algorithm's further models.
    """

    def __init__(
        self,
        scoring: Scoring,
        experiment: Experiment,
        server: ServerState,
        data: FederatedData,
        further: Sequence[str],
    ) -> None:
        self.scoring, self.experiment, self.data = scoring, experiment, data
        self.round, self.lr = server.round, server.lr
        self.cohort = frozenset(server.cohort.ids if scoring.of_cohort else ())
        ids = sorted({*self.cohort, *scoring.chosen})
        self.shares = {client: len(data.client_test(client)) for client in ids}
        self.members = members_of(server, data, [client for client in ids if self.shares[client]])
        self.broadcast = Broadcast({})
        if scoring.personal and self.members.ids:
            self.broadcast = personal_broadcast(experiment.algorithm, replace(server, cohort=self.members))
        self.scores: dict[str, dict[int, float]] = {name: {} for name in scoring.models(further)}

    def tasks(self, handle: Handle, states: Mapping[int, StateFile], slots: int) -> list[ScoreTask]:
        """Returns the tasks for ``slots`` workers that score the models that differ from client to client (personal and
        fine-tuned ones). The list is empty if there are no such models.

        ``handle`` refers to the broadcast with the models. ``states`` has the files of the clients' states, by client.
        """
        members, experiment, steps = self.members, self.experiment, self.scoring.finetune_steps
        if not (self.scoring.of_cohort and members.ids):
            return []
        batch = experiment.training.batch_size
        work = [
            1 + (self.scoring.personal + (steps > 0)) * self.shares[client] + 3 * steps * min(batch or size, size)
            for client, size in zip(members.ids, members.sizes, strict=True)
        ]
        tasks = []
        undivided = stacks(len(work), experiment.chunk) if experiment.vectorize and experiment.chunk else None
        for blocks in cut_into_tasks(work, slots, undivided=undivided):
            places = positions(blocks)
            ids = [members.ids[place] for place in places]
            scalars = {name: [values[place] for place in places] for name, values in self.broadcast.scalars.items()}
            tasks.append(
                ScoreTask(
                    round=self.round,
                    lr=self.lr,
                    blocks=blocks,
                    ids=ids,
                    gaps=[members.gaps[place] for place in places],
                    broadcast=handle,
                    personal=self.scoring.personal,
                    finetune_steps=steps,
                    scalars=scalars,
                    states=[states.get(client) for client in ids] if experiment.keeps_states else (),
                )
            )
        return tasks

    def take_each(self, model: str, each: NDArray[np.float64]) -> None:
        """Computes each client's score of a model that is the same for all clients, and stores the scores in this
        object. They follow from the model's evaluation on the whole test set.

        ``model`` is the name of the model. ``each [n, 2]`` has the numerator and the denominator of the main metric for
        each of the n test samples.
        """
        for client in self.members.ids:
            total, count = each[self.data.client_test(client)].sum(0)
            self._note(model, client, float(total), float(count))

    def take(self, task: ScoreTask, result: ScoreResult) -> None:
        """Computes the scores of the clients of ``task``, one of :meth:`tasks`, from its ``result``, and stores them in
        this object, for :meth:`row` and :meth:`rows`."""
        for model, found in result.sums.items():
            for client, (total, count) in zip(task.ids, found, strict=True):
                self._note(model, client, total, count)

    def _note(self, model: str, client: int, total: float, count: float) -> None:
        # a share may have nothing to count, such as no label and no prediction for an F1 score
        if count:
            self.scores[model][client] = self.experiment.task.value(self.scoring.metric, total, count)

    def row(self) -> dict[str, float]:
        """Returns what the scores add to the round's row of metrics.csv, as values by column.

        If the cohort is scored, each model has a column with its mean score over the cohort's clients that have a test
        share: ``personalized_<metric>``, ``finetuned_<metric>`` and ``<model>_on_shares_<metric>``.
        ``cohort_with_shares`` is the number of these clients, and ``cohort_least_share`` the fewest test samples of one
        of them.

        If ``run.eval_clients`` chose clients, ``clients_<metric>_mean``, ``_weighted_mean``, ``_worst_tenth`` and
        ``_std`` are what :data:`OF_CHOSEN` says of the global model's scores over the chosen clients that have a test
        share, and so are ``clients_personal_<metric>_mean`` and ``clients_finetuned_<metric>_mean`` and so on of models
        that differ from client to client. ``clients_with_shares`` is the number of these clients, and
        ``clients_least_share`` the fewest test samples of one of them.

        If there are no such clients, means, standard deviations and fewest samples are NaN.
        """
        row: dict[str, float] = {}
        if self.scoring.of_cohort:
            scored = [client for client in self.members.ids if client in self.cohort]
            for model, scores in self.scores.items():
                row[_column(model, self.scoring.metric)] = _mean(
                    [scores[client] for client in scored if client in scores]
                )
            row["cohort_with_shares"] = len(scored)
            row["cohort_least_share"] = min((self.shares[client] for client in scored), default=math.nan)
        if self.scoring.chosen:
            scored = [client for client in self.scoring.chosen if self.shares[client]]
            least = min((self.shares[client] for client in scored), default=math.nan)
            models = [model for model in self.scores if model == GLOBAL or model in CLIENT_MODEL_COLUMNS]
            values = [value for model in models for value in self._of_chosen(model, scored)]
            columns = columns_of_chosen(self.scoring.metric, models)
            row |= dict(zip(columns, (*values, len(scored), least), strict=True))
        return row

    def _of_chosen(self, model: str, scored: Sequence[int]) -> tuple[float, ...]:
        """Returns what :data:`OF_CHOSEN` says of the scores of ``model`` over those of the clients ``scored`` whose
        shares have something to count, NaN if there are none."""
        scores = self.scores[model]
        counted = [client for client in scored if client in scores]
        if not counted:
            return (math.nan,) * len(OF_CHOSEN)
        values, sizes = [scores[client] for client in counted], [self.shares[client] for client in counted]
        worst = sorted(values, reverse=self.experiment.task.mode == "min")[: math.ceil(len(values) / 10)]
        weighted = math.fsum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        return _mean(values), weighted, _mean(worst), float(np.std(values))

    def rows(self) -> dict[str, Any]:
        """Returns the columns of evaluation.parquet by name, with an entry for each client that is to be scored, even
        if it has no test share.

        The columns are ``round`` (one number for all rows), ``client``, ``in_cohort``, ``in_eval_clients``,
        ``test_samples``, the clients' names if they have some, and for each model its scores ``<model>_<metric>``,
        which are NaN for a client without a score.
        """
        chosen = frozenset(self.scoring.chosen)
        return {
            "round": self.round,
            "client": list(self.shares),
            **self.data.names_of(list(self.shares)),
            "in_cohort": [client in self.cohort for client in self.shares],
            "in_eval_clients": [client in chosen for client in self.shares],
            "test_samples": list(self.shares.values()),
        } | {
            f"{model}_{self.scoring.metric}": [scores.get(client, math.nan) for client in self.shares]
            for model, scores in self.scores.items()
        }


def members_of(server: ServerState, data: FederatedData, ids: list[int]) -> Cohort:
    """Returns the clients ``ids`` as a cohort of the current round, so that they can be scored like a cohort."""
    if not ids:
        return Cohort()
    sizes = data.sizes()[ids]
    gaps = {client: server.gap(client, server.round) for client in ids}
    gaps |= dict(zip(server.cohort.ids, server.cohort.gaps, strict=True))
    return Cohort(
        ids=ids,
        sizes=sizes.tolist(),
        weights=weights_of(sizes, server.weighting),
        steps=[1] * len(ids),
        gaps=[gaps[client] for client in ids],
    )


def _of_model(model: str) -> str:
    return "" if model == GLOBAL else f"{model}_"


def _column(model: str, metric: str) -> str:
    return f"{CLIENT_MODEL_COLUMNS.get(model, f'{model}_on_shares')}_{metric}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
