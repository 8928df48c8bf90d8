"""Makes the rule that takes the place of the mean of uploads, and the attack against which it is tried."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.core.local_training import Poison
from fedray.core.seeds import Purpose, stream
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.permissions import require
from fedray.experiment.stage import Stage
from fedray.robust import RULES
from fedray.robust.attacks import Attack
from fedray.robust.backdoor import Backdoor
from fedray.robust.rule import Rule

SMALL = 100_000_000
"""So many bytes of gathered uploads at the server need no line."""


@dataclass(frozen=True, kw_only=True)
class Robust(Stage):
    """How a server that gets the uploads of all clients one by one puts them together: by ``rule``, after an ``attack``
    of some of them, if there is one."""

    rule: Rule
    attack: Attack | None

    @property
    def poison(self) -> Poison | None:
        """What the attack makes of the samples on which clients train, None if nothing."""
        poisons = self.attack is not None and self.attack.kind in ("label_flip", "backdoor")
        return self.attack.poison if self.attack is not None and poisons else None


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
    if attack.kind in ("label_flip", "backdoor") and not classification:
        raise UserError(f"attack.kind={attack.kind} changes class numbers, which this task does not have")
    notes = []
    if config.train.weighting != "auto" and not rule.weighs:
        notes.append(
            f"warning: train.weighting={config.train.weighting} changes nothing: train.aggregation.kind={asked.kind} "
            "counts all clients alike"
        )
    if (size := 4 * numbers * cohort) > SMALL:
        notes.append(
            f"train.aggregation: the {cohort} uploads of a round are {size / 1e9:.3g} GB, and the server needs up to "
            "six times as much for them"
        )
    made = None
    if attack.kind is not None:
        made = _attack(config, data)
        notes.append(f"attack: {len(made.byzantine)} of {data.active} clients are Byzantine ({attack.kind})")
    return Robust(rule=rule, attack=made, settings={}, notes=tuple(notes))


def _attack(config: Config, data: FederatedData) -> Attack:
    asked, seed = config.attack, config.run.seed
    assert asked.kind is not None
    assert asked.fraction is not None
    present = np.flatnonzero(data.sizes())
    drawn = stream(seed, Purpose.ATTACK).choice(present, round(asked.fraction * len(present)), replace=False)
    byzantine = frozenset(drawn.tolist())
    if asked.kind != "backdoor":
        return Attack(asked.kind, byzantine, asked.strength, seed, data.classes)
    backdoor = _backdoor(config, data)
    marked = backdoor.chosen(len(data.y), 0.5 if asked.share is None else asked.share, seed)
    return Attack(asked.kind, byzantine, asked.strength, seed, data.classes, backdoor, marked)


def _backdoor(config: Config, data: FederatedData) -> Backdoor:
    """Returns the mark of ``attack.kind=backdoor``, whose pixels have the largest value of all test images. Raises
    :class:`UserError` if the data are no images in one array, or the mark or its target does not fit them."""
    target, patch, images = config.attack.target or 0, config.attack.patch or 3, data.x_test
    shape = data.input_shape
    if not isinstance(images, np.ndarray) or not isinstance(shape, tuple) or len(shape) != 3:
        raise UserError(
            "attack.kind=backdoor marks images in an array [n, channels, height, width]; these inputs are no "
            "images, or are read one by one (data.access)"
        )
    if config.data.augment != "none":
        raise UserError(f"data.augment={config.data.augment} would move or cut off the mark of attack.kind=backdoor")
    if not len(images):
        raise UserError("attack.kind=backdoor needs a test set, on which its success is measured")
    if patch > min(shape[-2:]):
        raise UserError(f"attack.patch={patch}: images have {shape[-2]} x {shape[-1]} pixels")
    if target >= data.classes:
        raise UserError(f"attack.target={target}: there are {data.classes} classes, from 0")
    return Backdoor(target, patch, float(images.max()))


def _check_algorithm(config: Config, algorithm: Algorithm) -> None:
    key = f"train.aggregation.kind={config.train.aggregation.kind}" if config.attack.kind is None else "attack"
    what = "its server's rule is right for something else than a mean of uploads"
    require(algorithm, config.algorithm.name, "allows_aggregation", key, what)
    if config.system.mode == "buffered":
        raise UserError(f"{key}: with system.mode=buffered clients do not begin with the same model")
    if config.run.diagnostics:
        raise UserError(f"{key}: run.diagnostics compares clients with the mean of their uploads")
