"""All robust rules and attacks pass the contracts, and those that break one fail its test."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import small_images
from torch import Tensor

from fedray.config import robust
from fedray.robust import ATTACKS, RULES, Attack, AttackedRows, AttackedRun, Rule
from fedray.testing import AttackContract, RuleContract

HERE = __name__


class TestMean(RuleContract):
    # train.aggregation.kind=mean alone is no rule
    rule = {"kind": "mean"}
    settings = {"attack": {"kind": "label_flip", "fraction": 0.3}}


class TestMedian(RuleContract):
    rule = {"kind": "median"}
    withstands = True


class TestTrimmedMean(RuleContract):
    rule = {"kind": "trimmed_mean", "b": 1}


class TestKrum(RuleContract):
    rule = {"kind": "krum", "f": 1}


class TestMultiKrum(RuleContract):
    rule = {"kind": "multi_krum", "f": 1}


class TestBulyan(RuleContract):
    rule = {"kind": "bulyan", "f": 1}


class TestGeometricMedian(RuleContract):
    rule = {"kind": "geometric_median"}
    withstands = True


class TestCenteredClip(RuleContract):
    rule = {"kind": "centered_clip", "tau": 1.0, "passes": 2}
    agrees = False
    withstands = True


class TestNormBound(RuleContract):
    rule = {"kind": "norm_bound", "norm": 1.0}
    agrees = False
    withstands = True


class TestLabelFlip(AttackContract):
    attack = {"kind": "label_flip"}


class TestBackdoor(AttackContract):
    attack = {"kind": "backdoor", "scale": 3.0, "patch": 2}

    def source(self) -> Any:
        return small_images()


class TestSignFlip(AttackContract):
    attack = {"kind": "sign_flip", "scale": 2.0}


class TestNoise(AttackContract):
    attack = {"kind": "noise"}


class TestALIE(AttackContract):
    attack = {"kind": "alie"}


class TestIPM(AttackContract):
    attack = {"kind": "ipm"}


TESTED = [each for each in globals().values() if isinstance(each, type) and each.__name__.startswith("Test")]


def test_every_rule_and_attack_is_tested() -> None:
    assert {each.rule["kind"] for each in TESTED if issubclass(each, RuleContract)} == set(RULES)
    assert {each.attack["kind"] for each in TESTED if issubclass(each, AttackContract)} == set(ATTACKS)


def test_keys_are_the_arguments_of_the_classes() -> None:
    for keys, classes in ((robust.RULES, RULES), (robust.ATTACKS, ATTACKS)):
        assert {kind: {*inspect.signature(cls).parameters} for kind, cls in classes.items()} == {
            kind: {*names} for kind, names in keys.items()
        }


class Average(Rule):
    """A rule that keeps its promises, from which wrong ones differ in one thing."""

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows.mean(dim=0)


class Remembering(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        self.last = getattr(self, "last", 0) + rows.mean(dim=0)
        return self.last


class Unseeded(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows[int(np.random.default_rng().integers(2**62) % len(rows))] * np.random.default_rng().random()


class Weighing(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return weights @ rows


class Following(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows.mean(dim=0) + (0 if before is None else before)


class Overwriting(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        weights /= 2
        return rows.mean(dim=0)


class First(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows[0]


class Total(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows.sum(dim=0)


class Needing(Average):
    def least(self) -> int:
        return 3


class OfTwo(Average):
    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows.std(dim=0)


ARGUMENTS = "test_it_depends_on_its_arguments_alone"


@pytest.mark.parametrize(
    ("cls", "test", "message"),
    [
        (Remembering, ARGUMENTS, "gave something else after other rows"),
        (Unseeded, ARGUMENTS, "gave something else after other rows"),
        (Weighing, ARGUMENTS, "does not say weighs = True"),
        (Following, ARGUMENTS, "does not say keeps = True"),
        (Overwriting, ARGUMENTS, "overwrites the weights"),
        (First, "test_the_order_of_clients", "the order of clients matters"),
        (Total, "test_what_all_send", "all clients send another row than this"),
        (Needing, "test_one_client_that_sends_anything", "one client sends nan, and the result is not finite"),
        (OfTwo, "test_it_returns_a_vector", "made NaN of"),
    ],
)
def test_wrong_rules(cls: type[Rule], test: str, message: str) -> None:
    contract = type("Wrong", (RuleContract,), {"rule": {"kind": f"{HERE}:{cls.__name__}"}})()
    with pytest.raises((AssertionError, ValueError), match=message):
        getattr(contract, test)()


class Honest(Attack):
    """An attack that keeps its promises, from which wrong ones differ in one thing."""

    def prepare(self, run: AttackedRun) -> None:
        self.wrong = torch.from_numpy(run.generator().integers(0, run.classes, len(run.data.y)))

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        return 2 * rows

    def poison(self, stored: Any, labels: Tensor, indices: Any) -> tuple[Any, Tensor]:
        return stored, self.wrong[torch.from_numpy(indices)]


class Meddling(Honest):
    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        sent.cohort.mul_(2)
        return rows


class Counting(Honest):
    calls = 0

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        self.calls += 1
        return self.calls * rows


class AnyNumbers(Honest):
    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        return torch.from_numpy(np.random.default_rng().random(rows.shape, np.float32))


class OfTheStack(Honest):
    def poison(self, stored: Any, labels: Tensor, indices: Any) -> tuple[Any, Tensor]:
        return stored + stored.mean(), labels


class Together(Honest):
    def victims(self) -> Any:
        return np.arange(10)

    def disguise(self, stored: Any, labels: Tensor) -> tuple[Any, Tensor]:
        return stored - stored.mean(dim=0), labels


@pytest.mark.parametrize(
    ("cls", "test", "message"),
    [
        (Meddling, "test_honest_uploads_are_untouched", "changes what an honest client sends"),
        (Counting, ARGUMENTS, "changed in another way after other rounds"),
        (AnyNumbers, ARGUMENTS, "changed in another way after other rounds"),
        (OfTheStack, "test_samples_are_poisoned_one_client_at_a_time", "a client alone trains on something else"),
        (Together, "test_victims_are_disguised_one_by_one", "a victim alone looks different"),
    ],
)
def test_wrong_attacks(cls: type[Attack], test: str, message: str) -> None:
    contract = type("Wrong", (AttackContract,), {"attack": {"kind": f"{HERE}:{cls.__name__}"}})()
    with pytest.raises(AssertionError, match=message):
        getattr(contract, test)()


class TestOwnRule(RuleContract):
    rule = {"kind": f"{HERE}:Average"}


class TestOwnAttack(AttackContract):
    attack = {"kind": f"{HERE}:Honest", "fraction": 0.2}
