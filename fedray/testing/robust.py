"""Contract tests of robust rules and of attacks. To test yours, subclass one of the classes here in a test file of
pytest.

from fedray.testing import RuleContract

class TestNearest(RuleContract):
    rule = {"kind": "mine.py:Nearest", "options": {"c": 3}}
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedray.api import simulate
from fedray.config import load
from fedray.config.robust import AggregationConfig
from fedray.core.samples import Samples
from fedray.core.seeds import Purpose, every_rng
from fedray.core.structure import leaves, map_leaves
from fedray.data.federated import FederatedData
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.experiment.robust import rule_of
from fedray.robust import Rule
from fedray.robust.attackers import Attackers
from fedray.robust.results import aggregated
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult
from fedray.usercode.importing import is_user_defined

D = 50
"""How many numbers the rows of the tests have."""

PICKLED = {"engine.kind": "fedray.testing.pickling:PicklingPool", "engine.chunk": 1}
"""Workers that get clients one by one, and to which everything is pickled as to actors."""


class _RunContract:
    """What the contracts of rules and attacks have in common: runs of FedAvg with them."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Further keys for the tests' runs, by dotted key."""
    records: ClassVar[str]
    """The name under which a run records the code."""

    def asked(self) -> dict[str, Any]:
        """Returns the keys that ask for what is tested."""
        raise NotImplementedError

    def source(self) -> Source:
        """Returns the data of the tests' runs."""
        return small_source()

    def config(self, folder: Path, **changes: Any) -> dict[str, Any]:
        """Returns the configuration of the tests' runs, as a dict with dotted keys. The run folder is created in
        ``folder``. ``changes`` replace keys; in their names ``__`` stands for a dot."""
        found = {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(folder), "run.rounds": 4, **self.asked()}
        return {**found, **self.settings, **{key.replace("__", "."): value for key, value in changes.items()}}

    def resolved(self, folder: Path) -> tuple[Experiment, FederatedData]:
        """Returns the experiment of such a run, and its data."""
        return resolve(load(self.config(folder)), CustomObjects(self.source()))

    def _run(self, folder: Path, callbacks: Any = (), **keys: Any) -> RunResult:
        return simulate({**self.config(folder), **keys}, data=self.source(), callbacks=callbacks)

    def test_it_is_part_of_the_result(self, tmp_path: Path) -> None:
        """Checks that a run records the code of a user-defined class, so that a run folder is not continued with
        another version of it."""
        kinds = [each["kind"] for each in self.asked().values() if isinstance(each, Mapping)]
        recorded = set(self.resolved(tmp_path)[0].inputs)
        assert (self.records in recorded) == any(map(is_user_defined, kinds))

    def test_a_run_has_the_same_bits_anywhere_and_in_parts(self, tmp_path: Path) -> None:
        """Checks that a run has the same model and tables to the bit if workers in other processes get clients one by
        one, and if the run is stopped and resumed."""
        keys = {"run.checkpoint_every": 1}
        whole = self._run(tmp_path / "whole", **keys)
        assert_same(whole, self._run(tmp_path / "pickled", **keys, **PICKLED))
        self._run(tmp_path / "parts", [lambda report: report.round == 2], **keys)
        assert_same(whole, self._run(tmp_path / "parts", **keys))


class RuleContract(_RunContract):
    """Tests that every robust rule must pass. A rule (``train.aggregation``) takes the place of the mean of clients'
    uploads.

    To test a rule, set ``rule`` in a subclass in a test file of pytest.
    """

    rule: ClassVar[Mapping[str, Any]]
    """The value of ``train.aggregation``: ``{"kind": "mine.py:Rule", "options": {...}}``, or a rule that comes with
    fedray, as ``{"kind": "krum", "f": 1}``."""
    agrees: ClassVar[bool] = True
    """Whether the rule returns the row that all clients send, if they send the same one. A rule that shortens long rows
    does not."""
    ignores_order: ClassVar[bool] = True
    """Whether the order of clients makes no difference but for rounding."""
    withstands: ClassVar[bool | None] = None
    """Whether the result is finite if one client sends NaN, infinity or huge numbers. None: if the rule needs more than
    one client, as those do that leave some out."""

    records = "rule of train.aggregation"

    def asked(self) -> dict[str, Any]:
        members = max(5, self._made().least())
        cohort = {"train.cohort_size": members, "data.clients": max(members, SETTINGS["data.clients"])}
        return {"train.aggregation": dict(self.rule), **cohort}

    def aggregate(
        self, rows: Tensor, weights: Tensor | None = None, before: Tensor | None = None, rule: Rule | None = None
    ) -> Tensor:
        """Applies a rule to ``rows [m, D]``, which are not changed, as a run does. It is a new instance unless ``rule``
        is one. By default clients have unequal weights."""
        if weights is None:
            weights = self._weights(len(rows))
        with every_rng(0, Purpose.ALGORITHM):
            return aggregated(rule or self._made(), rows.clone(), weights, before, "the rows of a contract test")

    def test_it_returns_a_vector(self) -> None:
        """Checks that the rule returns finite numbers, float32 ``[d]``, of the smallest cohort that it allows, and of
        larger ones."""
        least = self._made().least()
        assert least >= 1
        for members in (least, least + 1, least + 6):
            assert bool(self.aggregate(self._rows(members)).isfinite().all())

    def test_it_depends_on_its_arguments_alone(self) -> None:
        """Checks that the rule gives the same bits when it is repeated, also after other rows, and overwrites neither
        the weights nor what it gave before. If it does not say ``weighs``, the weights must make no difference, and if
        it does not say ``keeps``, neither must what it gave in the round before."""
        rule, rows = self._made(), self._rows(self._made().least() + 5)
        weights, before, others = self._weights(len(rows)), self._rows(2)[1], self._rows(len(rows), key=2)
        kept = before if rule.keeps else None
        copies = weights.clone(), before.clone()
        found = self.aggregate(rows, weights, kept, rule)
        self.aggregate(others, weights, None, rule)
        again = self.aggregate(rows, weights, kept, rule)
        assert torch.equal(found, again), "the same rows gave something else after other rows"
        assert torch.equal(found, self.aggregate(rows, weights, kept)), "another instance gives something else"
        assert torch.equal(weights, copies[0]), "the rule overwrites the weights"
        assert torch.equal(before, copies[1]), "the rule overwrites what it gave before"
        if not rule.weighs:
            uniform = self.aggregate(rows, torch.full_like(weights, 1 / len(rows)), kept)
            assert torch.equal(found, uniform), "the rule uses weights, and does not say weighs = True"
        if not rule.keeps:
            assert torch.equal(found, self.aggregate(rows, weights, before)), (
                "the rule uses what it gave before, and does not say keeps = True"
            )

    def test_the_order_of_clients(self) -> None:
        """Checks that clients may come in any order, if the rule ``ignores_order``: only the last digits may change."""
        rows = self._rows(self._made().least() + 5)
        weights = self._weights(len(rows))
        order = torch.from_numpy(self._generator(3).permutation(len(rows)))
        if not self.ignores_order:
            _skip("the rule may depend on the order of clients")
        found, expected = self.aggregate(rows[order], weights[order]), self.aggregate(rows, weights)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg="the order of clients matters")

    def test_what_all_send(self) -> None:
        """Checks that the rule returns the row that all clients send, if it ``agrees``."""
        if not self.agrees:
            _skip("the rule may shorten what all clients send")
        row = self._rows(1)[0]
        found = self.aggregate(row.repeat(self._made().least() + 4, 1))
        torch.testing.assert_close(found, row, rtol=1e-5, atol=1e-6, msg="all clients send another row than this")

    def test_one_client_that_sends_anything(self) -> None:
        """Checks that numbers of one client that are infinite, huge or none at all do not get into the result, if the
        rule ``withstands`` them."""
        least = self._made().least()
        if not (least > 1 if self.withstands is None else self.withstands):
            _skip("the rule does not say that it withstands a client")
        for odd in (np.nan, np.inf, -np.inf, 1e30):
            for places in (slice(None), slice(None, None, 2)):
                rows = self._rows(max(least, 3))
                rows[1, places] = odd
                found = self.aggregate(rows)
                assert bool(found.isfinite().all()), f"one client sends {odd}, and the result is not finite"

    def _made(self) -> Rule:
        return rule_of(AggregationConfig(**self.rule))

    def _generator(self, key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=key))

    def _rows(self, members: int, key: int = 1) -> Tensor:
        return torch.from_numpy(self._generator(key).normal(size=(members, D)).astype(np.float32))

    def _weights(self, members: int) -> Tensor:
        weights = torch.linspace(1, 3, members, dtype=torch.float64)
        return (weights / weights.sum()).float()


class AttackContract(_RunContract):
    """Tests that every attack must pass. An attack (``attack``) is what Byzantine clients do to harm the model.

    To test an attack, set ``attack`` in a subclass in a test file of pytest. If it needs other data than small vectors,
    such as images, define :meth:`source` too.
    """

    attack: ClassVar[Mapping[str, Any]]
    """The value of ``attack``: ``{"kind": "mine.py:Attack", "options": {...}}``, or an attack that comes with fedray,
    as ``{"kind": "ipm", "eps": 0.5}``. Unless it has a ``fraction``, three of ten clients are Byzantine."""

    records = "attack"

    def asked(self) -> dict[str, Any]:
        return {"attack": {"fraction": 0.3, **self.attack}}

    @cached_property
    def _prepared(self) -> tuple[Attackers, FederatedData]:
        experiment, data = self.resolved(Path())
        assert experiment.robust is not None
        assert experiment.robust.attackers is not None
        return experiment.robust.attackers, data

    def test_honest_uploads_are_untouched(self) -> None:
        """Checks that the attack changes the uploads of Byzantine clients alone, in cohorts with and without
        others."""
        attackers, data = self._prepared
        clients = np.flatnonzero(data.sizes()).tolist()
        for ids in (clients, sorted(attackers.clients), sorted(set(clients) - attackers.clients)):
            rows = self._rows(len(ids))
            found = attackers.upload(rows.clone(), ids, 3, "y", 0)
            honest = [row for row, client in enumerate(ids) if client not in attackers.clients]
            assert torch.equal(found[honest], rows[honest]), "the attack changes what an honest client sends"

    def test_it_depends_on_its_arguments_alone(self) -> None:
        """Checks that the attack sends the same bits when it is repeated, also after other rounds, and in another
        process."""
        attackers, data = self._prepared
        clients = np.flatnonzero(data.sizes()).tolist()
        rows, fresh = self._rows(len(clients)), copy.deepcopy(attackers)

        def sent(by: Attackers, round: int) -> Tensor:
            with every_rng(0, Purpose.ALGORITHM):
                return by.upload(rows.clone(), clients, round, "y", 0)

        first = sent(attackers, 3)
        sent(attackers, 4)
        assert torch.equal(sent(attackers, 3), first), "the same rows were changed in another way after other rounds"
        assert torch.equal(sent(fresh, 3), first), "another process would send something else"

    def test_samples_are_poisoned_one_client_at_a_time(self) -> None:
        """Checks that a Byzantine client trains on the same samples to the bit whichever clients and local steps a
        worker computes together, and when it is repeated. Those of other clients must be their own."""
        attackers, data = self._prepared
        if not attackers.attack.poisons():
            _skip("the attack changes no samples")
        clients = [*sorted(attackers.clients)[:2], *sorted(set(range(data.clients)) - attackers.clients)[:1]]
        indices = np.stack([np.resize(data.client(client), (2, 4)) for client in clients], axis=1)
        found = self._poisoned(attackers, data, clients, indices)
        for row, client in enumerate(clients):
            for step in range(2):
                alone = self._poisoned(attackers, data, [client], indices[step : step + 1, row : row + 1])
                there = map_leaves(lambda each, s=step, r=row: each[s : s + 1, r : r + 1], found)
                assert _equal(alone, there), "a client alone trains on something else"
        own = map_leaves(lambda each: each[:, 2], (self._samples(data).raw(indices)))
        assert _equal(map_leaves(lambda each: each[:, 2], found), own), "the samples of an honest client are changed"

    def test_victims_are_disguised_one_by_one(self) -> None:
        """Checks that a test sample on which the attack's success is measured looks the same whichever samples are
        evaluated together."""
        attackers, data = self._prepared
        attack = attackers.attack
        if not attack.has_victims():
            _skip("the attack's success is not measured")
        victims = np.asarray(attack.victims(), np.int64)
        assert len(victims) == len(np.unique(victims[victims < len(data.y_test)])), "there are no such test samples"
        stored, labels = self._samples(data, test=True).raw(victims[:5])
        shown = attack.disguise(stored, labels)
        for row in range(len(labels)):
            own = map_leaves(lambda each, r=row: each[r : r + 1].clone(), (stored, labels))
            there = map_leaves(lambda each, r=row: each[r : r + 1], shown)
            assert _equal(attack.disguise(*own), there), "a victim alone looks different"

    def _poisoned(self, attackers: Attackers, data: FederatedData, clients: list[int], indices: Any) -> Any:
        return attackers.poison(*self._samples(data).raw(indices), clients, indices)

    def _samples(self, data: FederatedData, test: bool = False) -> Samples:
        x, y = (data.x_test, data.y_test) if test else (data.x, data.y)
        return Samples(map_leaves(torch.from_numpy, x), torch.from_numpy(np.asarray(y)))

    def _rows(self, members: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=1))
        return torch.from_numpy(generator.normal(size=(members, D)).astype(np.float32))


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two nested tuples and dicts have equal tensors."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _skip(why: str) -> None:
    import pytest

    pytest.skip(why)
