"""Scores models on single clients: their accuracies on the clients' own test shares, at the end of a round.

Every model is scored on the same shares, so that the numbers can be compared. The models are the global model, the
algorithm's further models, its personal models, and the global model after some steps of local training on each client.
The first two are the same for all clients, so the evaluation of the whole test set has told already which samples they
get right. Only the models that each client has of its own need work of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedray.algorithms import Broadcast, Cohort, ServerState
from fedray.data.federated import FederatedData
from fedray.data.test_shares import draw_eval_clients
from fedray.engine.cohorts import weights_of
from fedray.engine.dealing import deal
from fedray.engine.states import StateFile
from fedray.engine.tasks import GLOBAL, Handle, ScoreResult, ScoreTask, positions
from fedray.experiment import Experiment

OWN_COLUMNS = {"personal": "personalized_accuracy", "finetuned": "finetuned_accuracy"}
"""Columns of metrics.csv for the models of which each client has its own. A model that all clients share has the column
``<model>_on_shares_accuracy``."""

OF_CHOSEN = (
    "clients_accuracy_mean", "clients_accuracy_worst_tenth", "clients_accuracy_std", "clients_with_shares",
    "clients_least_share",
)  # fmt: skip
"""Columns of metrics.csv about the clients that ``run.eval_clients`` chose."""


@dataclass(frozen=True)
class Scoring:
    """Says which clients are scored at each evaluation of a run, and by which models.

    The cohort is scored if there are ``personal`` models or ``finetune_steps``. The clients ``chosen`` by
    ``run.eval_clients`` are always scored, whether they are in the cohort or not.
    """

    personal: bool = False
    finetune_steps: int = 0
    chosen: tuple[int, ...] = ()

    @classmethod
    def of(cls, experiment: Experiment, data: FederatedData) -> Scoring:
        """Returns what the configuration asks for. Where the test set is left alone, no client is scored."""
        run = experiment.config.run
        if not run.eval_test:
            return cls()
        chosen = draw_eval_clients(data, experiment.config.data.seed or 0, run.eval_clients)
        return cls(experiment.algorithm.has_personal_model(), run.finetune_steps, tuple(chosen.tolist()))

    @property
    def wanted(self) -> bool:
        """Whether any client is scored on its own test share, so that the run has evaluation.parquet."""
        return self.of_cohort or bool(self.chosen)

    @property
    def of_cohort(self) -> bool:
        """Whether the clients of each cohort are scored."""
        return self.personal or self.finetune_steps > 0

    def models(self, further: Sequence[str]) -> list[str]:
        """Returns the names of all models that a client is scored by."""
        own = {"personal": self.personal, "finetuned": self.finetune_steps > 0}
        return [GLOBAL, *further, *(name for name, there in own.items() if there)]

    def columns(self, further: Sequence[str]) -> list[str]:
        """Returns the columns that scoring adds to metrics.csv."""
        of_cohort = [_column(name) for name in self.models(further)] + ["cohort_with_shares", "cohort_least_share"]
        return [*(of_cohort if self.of_cohort else ()), *(OF_CHOSEN if self.chosen else ())]


class ClientScores:
    """The scores of one round.

    They are complete, as ``row`` and ``rows``, when :meth:`take` has had the result of each of the ``tasks``, and
    :meth:`take_right` has had every model that was evaluated on the whole test set.
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
        self.members = _members(server, data, [client for client in ids if self.shares[client]])
        self.broadcast = Broadcast({})
        if scoring.personal and self.members.ids:
            self.broadcast = experiment.algorithm.personal_broadcast(replace(server, cohort=self.members))
        self.accuracies: dict[str, dict[int, float]] = {name: {} for name in scoring.models(further)}

    def tasks(self, handle: Handle, states: Mapping[int, StateFile], slots: int) -> list[ScoreTask]:
        """Returns the tasks of scoring, for ``slots`` workers; ``handle`` names the broadcast that they need."""
        members, experiment, steps = self.members, self.experiment, self.scoring.finetune_steps
        if not (self.scoring.of_cohort and members.ids):
            return []
        batch = experiment.training.batch_size
        work = [
            1 + (self.scoring.personal + (steps > 0)) * self.shares[client] + 3 * steps * min(batch or size, size)
            for client, size in zip(members.ids, members.sizes, strict=True)
        ]
        tasks = []
        for blocks in deal(work, slots, size=experiment.chunk if experiment.vectorize else None):
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
                    states=[states.get(client) for client in ids] if experiment.algorithm.stateful else (),
                )
            )
        return tasks

    def take_right(self, model: str, right: NDArray[np.bool_]) -> None:
        """Takes which samples of the whole test set a model gets right. The model is the same for all clients."""
        self.accuracies[model] = {
            client: float(right[self.data.client_test(client)].mean()) for client in self.members.ids
        }

    def take(self, task: ScoreTask, result: ScoreResult) -> None:
        """Takes the result of a task."""
        for model, correct in result.correct.items():
            found = self.accuracies[model]
            for client, right in zip(task.ids, correct, strict=True):
                found[client] = right / self.shares[client]

    def row(self) -> dict[str, float]:
        """Returns the columns of metrics.csv: means over the clients that have a test share, NaN if none has one."""
        row: dict[str, float] = {}
        if self.scoring.of_cohort:
            scored = [client for client in self.members.ids if client in self.cohort]
            for model, accuracies in self.accuracies.items():
                row[_column(model)] = _mean([accuracies[client] for client in scored])
            row["cohort_with_shares"] = len(scored)
            row["cohort_least_share"] = min((self.shares[client] for client in scored), default=math.nan)
        if self.scoring.chosen:
            scored = [client for client in self.scoring.chosen if self.shares[client]]
            found = sorted(self.accuracies[GLOBAL][client] for client in scored)
            least = min((self.shares[client] for client in scored), default=math.nan)
            spread = float(np.std(found)) if found else math.nan
            worst = _mean(found[: math.ceil(len(found) / 10)])
            row |= dict(zip(OF_CHOSEN, (_mean(found), worst, spread, len(scored), least), strict=True))
        return row

    def rows(self) -> dict[str, Any]:
        """Returns the columns of evaluation.parquet as lists, with a row for each client, whether it has a test share
        or not."""
        chosen = frozenset(self.scoring.chosen)
        return {
            "round": self.round,
            "client": list(self.shares),
            **self.data.names_of(list(self.shares)),
            "in_cohort": [client in self.cohort for client in self.shares],
            "in_eval_clients": [client in chosen for client in self.shares],
            "test_samples": list(self.shares.values()),
        } | {
            f"{model}_accuracy": [accuracies.get(client, math.nan) for client in self.shares]
            for model, accuracies in self.accuracies.items()
        }


def _members(server: ServerState, data: FederatedData, ids: list[int]) -> Cohort:
    """Returns the clients ``ids``, described as a cohort of the server's round."""
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


def _column(model: str) -> str:
    return OWN_COLUMNS.get(model, f"{model}_on_shares_accuracy")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
