"""Makes the rule that takes the place of the mean of uploads, and the attack against which it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from fedray.algorithms import Algorithm, known_algorithms
from fedray.config import Config
from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.stage import Stage
from fedray.robust import RULES
from fedray.robust.attacks import Attack
from fedray.robust.rule import Rule

SMALL = 100_000_000
"""So many bytes of uploads at the server need no line."""


@dataclass(frozen=True, kw_only=True)
class Robust(Stage):
    """How a server that gets the uploads of all clients one by one puts them together: by ``rule``, after an ``attack``
    of some of them, if there is one. ``relabel`` is what an attack makes of labels
    (:class:`fedray.core.local_training.LocalTraining`)."""

    rule: Rule
    attack: Attack | None
    relabel: Callable[[Tensor, Sequence[int]], Tensor] | None = None


def robust_of(
    config: Config, algorithm: Algorithm, data: FederatedData, cohort: int, numbers: int, classification: bool
) -> Robust | None:
    """Returns what ``train.aggregation`` and ``attack`` ask for, or None if they ask for nothing: the server then gets
    sums alone.

    Args:
        config: The configuration.
        algorithm: The algorithm of the run.
        data: The clients' samples.
        cohort: The size of a cohort.
        numbers: How many numbers a model has.
        classification: Whether the targets are class numbers, which ``attack.kind=label_flip`` changes.

    Raises:
        UserError: The rule or the attack does not go with the algorithm, the cohort or the task.
    """
    asked, attack = config.train.aggregation, config.attack
    if asked.kind == "mean" and attack.kind is None:
        return None
    _check_algorithm(config, algorithm)
    rule = RULES[asked.kind](**asked.options)
    if cohort < rule.least():
        options = ", ".join(f"{key}={value}" for key, value in asked.options.items())
        raise UserError(
            f"train.aggregation: {asked.kind} with {options} needs cohorts of at least {rule.least()} clients, and "
            f"there are {cohort} (train.cohort_size)"
        )
    if attack.kind == "label_flip" and not classification:
        raise UserError("attack.kind=label_flip changes class numbers, which this task does not have")
    notes = []
    if (size := 4 * numbers * cohort) > SMALL:
        notes.append(
            f"train.aggregation: the {cohort} uploads of a round are {size / 1e9:.3g} GB, and the server needs up to "
            "six times as much for them"
        )
    byzantine = frozenset[int]()
    if attack.kind is not None:
        assert attack.fraction is not None
        present = np.flatnonzero(data.sizes())
        count = round(attack.fraction * len(present))
        drawn = stream(config.run.seed, Purpose.ATTACK).choice(present, count, replace=False)
        byzantine = frozenset(drawn.tolist())
        notes.append(f"attack: {count} of {len(present)} clients are Byzantine ({attack.kind})")
    made = Attack(attack.kind, byzantine, attack.strength, config.run.seed) if attack.kind else None
    flips = made is not None and made.kind == "label_flip"
    relabel = partial(made.labels, classes=data.classes) if made and flips else None
    return Robust(rule=rule, attack=made, relabel=relabel, settings={}, notes=tuple(notes))


def _check_algorithm(config: Config, algorithm: Algorithm) -> None:
    key = f"train.aggregation.kind={config.train.aggregation.kind}" if config.attack.kind is None else "attack"
    if not vars(type(algorithm)).get("allows_aggregation", False):
        able = sorted(known for known, cls in known_algorithms().items() if vars(cls).get("allows_aggregation", False))
        raise UserError(
            f"{key}: algorithm.name={config.algorithm.name} does not say that its server's rule is right for something "
            f"else than a mean of uploads (allows_aggregation = True); these do: {', '.join(able)}"
        )
    if config.system.mode == "buffered":
        raise UserError(f"{key}: with system.mode=buffered clients do not begin with the same model")
    if config.run.diagnostics:
        raise UserError(f"{key}: run.diagnostics compares clients with the mean of their uploads")
