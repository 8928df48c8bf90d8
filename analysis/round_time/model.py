"""A model of a round's time: a sum of terms with a meaning each, fitted to what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from round_time.points import WORKS, Point
from round_time.traffic import Known, clients_in_turn, sent

TERMS = {
    "round": "what every round takes",
    "task": "a task that is sent to an actor and comes back",
    "client": "a client of the cohort, at the server: its numbers, its row in clients.parquet",
    "registered client": "drawing the cohort from all registered clients",
    "million parameters": "the server's rule, and the broadcast, for each million parameters",
    "actor": "an actor that takes part in the round",
    "MB of sums": "a MB of sums that reaches the server: copied and added up",
    "MB between hosts": "a MB that crosses the network: the model to each other host, and sums from them",
}
"""The terms of a round's time that all models share, and what each stands for. There is one more for each model,
:func:`step_of`."""


def step_of(model: str) -> str:
    """Returns the name of the term for a local step of ``model``, on the processor that has most of them to do."""
    return f"step of {WORKS[model].name}"


def amounts(point: Point, known: Known, processors: int) -> dict[str, float]:
    """Returns how much of each term a round of ``point`` has on ``processors`` processors, from the configuration
    alone. A term that is not in the result has no part in the round's time."""
    arriving = sent(point, known)
    vector = known.parameters / 1e6
    return {
        "round": 1.0,
        "task": float(arriving.tasks),
        "client": float(point.cohort),
        "registered client": float(point.clients),
        "million parameters": vector,
        "actor": float(min(point.actors, arriving.tasks)),
        "MB of sums": 8 * vector * arriving.nodes,
        "MB between hosts": 8 * vector * arriving.nodes_from_others + 4 * vector * arriving.models_to_others,
        step_of(point.model): float(point.steps * clients_in_turn(point, processors)),
    }


USUAL = 0.2
"""A usual error of the model, as a logarithm: about 20 %."""

NEGLIGIBLE = 1e-3
"""The part of a round's time below which a term counts as zero, if it is below it in all rounds."""


@dataclass(frozen=True)
class Measured:
    """A measured point as the model sees it: its ``point``, the ``seconds`` of a round, the ``worker_seconds`` that all
    actors together worked in it, the machine's ``processors``, and the ``parameters`` of the neural network."""

    point: Point
    seconds: float
    worker_seconds: float
    processors: int
    parameters: int

    @property
    def seconds_per_sample(self) -> float:
        """The seconds that an actor takes to train on a sample."""
        return self.worker_seconds / (self.point.cohort * self.point.steps * self.point.work.batch)


def known_models(rows: Iterable[Measured]) -> dict[str, Known]:
    """Returns what ``rows`` say about their models, by the model's name: medians over the rows."""
    found: dict[str, list[Measured]] = {}
    for row in rows:
        found.setdefault(row.point.model, []).append(row)
    return {
        model: Known(each[0].parameters, statistics.median(row.seconds_per_sample for row in each))
        for model, each in found.items()
    }


@dataclass(frozen=True)
class Fit:
    """The fitted model: the seconds that one unit of each term takes (``seconds_of``), and what is known of each neural
    network (``known``)."""

    seconds_of: Mapping[str, float]
    known: Mapping[str, Known]

    def parts(self, point: Point, processors: int) -> dict[str, float]:
        """Returns the seconds of a round of ``point`` that each term takes, by the term's name."""
        found = amounts(point, self.known[point.model], processors)
        return {term: amount * self.seconds_of.get(term, 0.0) for term, amount in found.items()}

    def seconds(self, point: Point, processors: int) -> float:
        """Returns how many seconds a round of ``point`` takes."""
        return sum(self.parts(point, processors).values())

    def with_network(self, bytes_per_second: float) -> Fit:
        """Returns the same model for a network that carries ``bytes_per_second`` to the server, if that is slower than
        the measured one."""
        term = "MB between hosts"
        slower = max(self.seconds_of.get(term, 0.0), 1e6 / bytes_per_second)
        return replace(self, seconds_of={**self.seconds_of, term: slower})


def fit(rows: Sequence[Measured], known: Mapping[str, Known] | None = None) -> Fit:
    """Returns the model whose logarithmic errors on ``rows`` are smallest, in the sense of least squares, with no term
    below zero. So a prediction of half the seconds is as wrong as one of twice as many. Of an error beyond
    :data:`USUAL` only the size counts and not the square, because a point may have been disturbed.

    What the actors' work takes is an observation of its own, unless they had to share processors.
    """
    known = known or known_models(rows)
    alone = [row for row in rows if row.point.actors <= row.processors]
    found = [amounts(row.point, known[row.point.model], row.processors) for row in rows]
    found += [{step_of(row.point.model): float(row.point.steps * row.point.cohort)} for row in alone]
    terms = [*TERMS, *(step_of(model) for model in WORKS if model in known)]
    seconds = np.array([*(row.seconds for row in rows), *(row.worker_seconds for row in alone)])
    relative = np.array([[each.get(term, 0.0) for term in terms] for each in found]) / seconds[:, None]
    # the terms' sizes differ by ten orders of magnitude
    sizes = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    relative /= sizes
    begin, _ = nnls(relative, np.ones(len(seconds)))
    values = least_squares(
        lambda values: np.log(relative @ values),
        # from within the bounds
        begin + 1e-3 * begin.max(),
        jac=lambda values: relative / (relative @ values)[:, None],
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=USUAL,
    ).x
    values[(relative * values).max(axis=0) < NEGLIGIBLE] = 0.0
    return Fit(dict(zip(terms, (values / sizes).tolist(), strict=True)), known)


def resampled(rows: Sequence[Measured], times: int = 100) -> list[Fit]:
    """Returns models that are fitted to rows drawn from ``rows`` with replacement. How they differ shows how well the
    rows determine the model."""
    rng, known = np.random.default_rng(0), known_models(rows)
    return [fit([rows[place] for place in rng.integers(len(rows), size=len(rows))], known) for _ in range(times)]


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Returns the 2.5 % and the 97.5 % quantile of ``values``."""
    low, high = np.quantile(list(values), [0.025, 0.975])
    return float(low), float(high)


CHECKS: Mapping[str, Callable[[Point], bool]] = {
    "3 hosts, from 1 and 2": lambda point: point.hosts > 2,
    "100,000 registered clients, from at most 10,000": lambda point: point.clients > 10_000,
    "cohorts of 1,000, from at most 316": lambda point: point.cohort > 316,
    "8 actors and more, from at most 4": lambda point: point.actors > 4,
}
"""What the model is checked with: a name, and which points are left out of the fit and then predicted."""


@dataclass(frozen=True)
class Check:
    """What a check has found: the points that were ``left_out``, and the model that was fitted to the others."""

    name: str
    left_out: Sequence[Measured]
    fitted: Fit

    @property
    def errors(self) -> list[float]:
        """The relative error of each prediction: 0.1 if it is 10 % above what was measured."""
        return [self.fitted.seconds(row.point, row.processors) / row.seconds - 1 for row in self.left_out]


def checks(rows: Sequence[Measured]) -> list[Check]:
    """Makes each of :data:`CHECKS` for which there are points to predict, of models that are in the fit too."""
    found = []
    for name, apart in CHECKS.items():
        rest = [row for row in rows if not apart(row.point)]
        models = {row.point.model for row in rest}
        left_out = [row for row in rows if apart(row.point) and row.point.model in models]
        if left_out and len(rest) > len(TERMS):
            found.append(Check(name, left_out, fit(rest)))
    return found


PROJECTED = (("logistic", 2), ("logistic", 50), ("lenet5", 3), ("lenet5", 50), ("resnet18", 1), ("resnet18", 50))
"""The models that are carried on to more nodes, each with a number of local steps."""

COHORT = {"cohort": 1000, "clients": 100_000}
"""The cohort of these rounds."""


def projected(model: str, nodes: int, processors_each: int, **of_point: Any) -> tuple[Point, int]:
    """Returns a point with an actor for each processor of ``nodes`` hosts that have ``processors_each``, and the number
    of all processors. ``of_point`` are further fields of the point."""
    processors = nodes * processors_each
    return Point(model, actors=processors, hosts=nodes, **of_point), processors
