"""Makes the rule that takes the place of the mean of uploads, and the attack against which it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.config.robust import AggregationConfig
from fedray.core.local_training import Poison
from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.permissions import require
from fedray.experiment.stage import Stage
from fedray.gradients.known_code import is_of_known
from fedray.robust import ATTACKS, RULES, Attack, AttackedRun, Rule
from fedray.robust.attackers import Attackers
from fedray.usercode.extensions import check_entry, find, instance, is_object
from fedray.usercode.importing import as_user_error

RULE, ATTACK = "train.aggregation.kind", "attack.kind"
"""The keys that name the two."""

Base = TypeVar("Base", Rule, Attack)


@dataclass(frozen=True, kw_only=True)
class Robust(Stage):
    """How a server that gets the uploads of all clients one by one puts them together: by ``rule``, after the attack of
    ``attackers``, if there are any."""

    rule: Rule
    attackers: Attackers | None

    @property
    def attack(self) -> Attack | None:
        """What the attackers do, None if there are none."""
        return None if self.attackers is None else self.attackers.attack

    @property
    def poison(self) -> Poison | None:
        """What the attack makes of the samples on which clients train, None if nothing."""
        attackers = self.attackers
        return attackers.poison if attackers is not None and attackers.attack.poisons() else None

    @property
    def user_code(self) -> dict[str, type]:
        """The classes of the rule and of the attack that are user-defined, by the names under which a run records their
        code."""
        classes = {"rule of train.aggregation": type(self.rule), "attack": type(self.attack)}
        return {name: cls for name, cls in classes.items() if not is_of_known(cls)}


def robust_of(
    config: Config, custom: CustomObjects, algorithm: Algorithm, data: FederatedData, cohort: int, task: str
) -> Robust | None:
    """Returns what ``train.aggregation`` and ``attack`` ask for, or None if they ask for nothing: the server then gets
    sums alone.

    Args:
        config: The configuration.
        custom: The user's objects, among which may be a rule and an attack.
        algorithm: The algorithm of the run.
        data: The clients' samples.
        cohort: The size of a cohort.
        task: The kind of task, such as ``classification``.

    Raises:
        UserError: The rule or the attack can't be made, or does not go with the algorithm, the cohort or the task.
    """
    asked = config.train.aggregation
    if asked.kind == "mean" and config.attack.kind is None:
        return None
    _check_algorithm(config, algorithm)
    rule = rule_of(asked, custom.aggregation)
    _check_cohort(rule, config, cohort)
    notes = []
    if config.train.weighting != "auto" and not rule.weighs:
        notes.append(
            f"warning: train.weighting={config.train.weighting} changes nothing: train.aggregation.kind={asked.kind} "
            "counts all clients alike"
        )
    attackers = None
    if config.attack.kind is not None:
        attackers = _attackers(config, custom.attack, data, task)
        number = len(attackers.clients)
        notes.append(f"attack: {number} of {data.active} clients are Byzantine ({config.attack.kind})")
    return Robust(rule=rule, attackers=attackers, settings={}, notes=tuple(notes))


def rule_of(asked: AggregationConfig, given: Rule | type[Rule] | None = None) -> Rule:
    """Returns the rule that ``train.aggregation`` asks for, or the one that the user has passed in its place,
    ``given``. Raises :class:`UserError` if it can't be made."""
    return _made(asked.kind if given is None else given, asked.arguments, RULE, RULES, Rule)


def _made(kind: Any, arguments: Mapping[str, Any], key: str, known: Mapping[str, Any], base: type[Base]) -> Base:
    """Returns the rule or attack that ``key`` names as ``kind``: one of ``known``, or a user-defined one; or the object
    ``kind`` that was passed in its place. Raises :class:`UserError` if it is no subclass of ``base`` or an instance of
    one, or can't be made with these ``arguments``."""
    found = find(kind, key, known)
    cls = type(found) if is_object(kind) and not isinstance(found, type) else found
    if not (isinstance(cls, type) and issubclass(cls, base)):
        what = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        name = check_entry(kind, key, known)
        raise UserError(f"{key}={name} must be a subclass of fedray.robust.{base.__name__}, not {what}")
    made: Base = instance(kind, key, known, options=arguments)
    return made


def _check_cohort(rule: Rule, config: Config, cohort: int) -> None:
    """Raises :class:`UserError` if ``rule`` needs larger cohorts than those of ``cohort`` clients."""
    asked = config.train.aggregation
    with as_user_error(f"{RULE}={asked.kind}: least() failed"):
        least = rule.least()
        too_small = cohort < least
    if too_small:
        options = ", ".join(f"{key}={value}" for key, value in asked.arguments.items())
        raise UserError(
            f"train.aggregation: {asked.kind}{' with ' * bool(options)}{options} needs cohorts of at least {least} "
            f"clients, and there are {cohort} (train.cohort_size)"
        )


def _attackers(config: Config, given: Attack | type[Attack] | None, data: FederatedData, task: str) -> Attackers:
    """Draws the Byzantine clients by ``run.seed``, and returns them with the attack, which is prepared: the one that
    ``attack.kind`` names, or the one that the user has passed in its place, ``given``."""
    seed, kind, fraction = config.run.seed, config.attack.kind, config.attack.fraction
    assert kind is not None
    assert fraction is not None
    present = np.flatnonzero(data.sizes())
    drawn = stream(seed, Purpose.ATTACK).choice(present, round(fraction * len(present)), replace=False)
    attack = _made(kind if given is None else given, config.attack.arguments, ATTACK, ATTACKS, Attack)
    with as_user_error(f"{ATTACK}={kind}: prepare() failed"):
        attack.prepare(AttackedRun(data, task, config.data.augment, seed, kind))
    return Attackers(attack, frozenset(drawn.tolist()), seed)


def _check_algorithm(config: Config, algorithm: Algorithm) -> None:
    key = f"{RULE}={config.train.aggregation.kind}" if config.attack.kind is None else "attack"
    what = "its server's rule is right for something else than a mean of uploads"
    require(algorithm, config.algorithm.name, "allows_aggregation", key, what)
    if config.system.mode == "buffered":
        raise UserError(f"{key}: with system.mode=buffered clients do not begin with the same model")
    if config.run.diagnostics:
        raise UserError(f"{key}: run.diagnostics compares clients with the mean of their uploads")
