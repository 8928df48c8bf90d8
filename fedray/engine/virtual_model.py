"""Compares the mean of locally trained models with a model that is trained on all their data together
(``run.diagnostics=virtual``).

The *virtual* model begins the round where the clients do. In each of its steps its gradient is the mean of the
gradients that all clients of the cohort have at it, each on its own mini-batch, by their aggregation weights. So it is
what the cohort's mean would be if the clients did not drift apart between two rounds (the virtual global model of
pFedMo's analysis, J. Fu, Z. Yang et al., IEEE Trans. Big Data 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.engine.state.run import RunState
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.tracking.diagnostics import Measured


class VirtualModel:
    """The comparison of one round. The virtual model is trained before the round, in this process, and :meth:`distance`
    is called after it."""

    def __init__(self, state: RunState, experiment: Experiment) -> None:
        assert isinstance(experiment.algorithm, Measured)
        self.algorithm = algorithm = experiment.algorithm
        broadcast = algorithm.broadcast(state.server, algorithm.phases[0])
        cohort = state.as_cohort(state.server, broadcast)
        client = together(cohort)
        carry = algorithm.local_steps(client, algorithm.begin(client))
        self._update = algorithm.update_of(client, carry)[0]

    def distance(self) -> dict[str, float]:
        """Returns the column of metrics.csv."""
        return {"virtual_distance": float(torch.linalg.vector_norm(self.algorithm.mean - self._update))}


def together(cohort: ClientPhase) -> ClientPhase:
    """Returns the clients of a stack as one client, whose gradient is the mean of theirs by their weights.

    Its numbers (J, n, and what the server sent to each client) are their means by the same weights.
    """
    one = ClientPhase.__new__(ClientPhase)
    one.__dict__.update(cohort.__dict__)
    weights = torch.tensor(cohort.stack.weights, dtype=torch.float64, device=cohort.p.device)
    one.size = 1
    one.stack = replace(cohort.stack, steps=[max(cohort.stack.steps)])
    one.data = _OneData(cohort, weights)  # type: ignore[assignment]
    one.objective = _OneObjective(cohort, weights)  # type: ignore[assignment]
    one.scalars = {name: _mean(values, weights) for name, values in cohort.scalars.items()}
    one.__dict__.pop("p", None)
    one.__dict__.pop("gap", None)
    return one


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean ``[1, k]`` of rows ``[C, k]``."""
    return (weights @ values.double()).float()[None]


class _OneData:
    """The data of all clients of a stack as those of one, as far as an algorithm's local steps ask for them."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort = cohort
        self.n, self.J = _mean(cohort.n, weights), _mean(cohort.J, weights)

    def batches(self) -> Iterator[Batch]:
        return self._cohort.data.batches()


class _OneObjective:
    """The weighted mean of the clients' losses. Clients whose local steps are over count no more."""

    def __init__(self, cohort: ClientPhase, weights: Tensor) -> None:
        self._cohort, self._weights = cohort, weights
        self._steps: Sequence[int] = cohort.stack.steps

    def gradient(self, at: Model, batch: Batch) -> Tensor:
        """Returns the gradient ``[1, width]`` at the one model ``at``."""
        going = torch.tensor([batch.step < steps for steps in self._steps], device=self._weights.device)
        weights = torch.where(going, self._weights, 0.0)
        rows = self._cohort.objective.gradient(Model(at.row.expand(len(self._steps), -1).clone(), at.width), batch)
        return _mean(rows, weights / weights.sum())

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            "run.diagnostics=virtual is for algorithms whose local steps need the gradient of the task loss alone; use "
            "true"
        )
