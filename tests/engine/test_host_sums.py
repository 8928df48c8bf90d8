"""Uploads are added up on the nodes of the clients: those of one sum, and of no other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from fedray.engine.ray import host_sums
from fedray.engine.ray.client_actor import Sums
from fedray.engine.ray.host_sums import HostSums
from fedray.engine.ray.node_actor import added_up
from fedray.engine.tasks import PartialSum, PhaseResult, PhaseTask

WIDTH = 3


def task_of(place: int, members: int, of: int) -> PhaseTask:
    task = PhaseTask(1, 0, [(place, place + 1)], members, 1.0, 0.1, [place], [1.0], [1], [0], [], [])
    return replace(task, sum=of)


def result_of() -> PhaseResult:
    return PhaseResult({"y": PartialSum({}, "weighted_mean", is_model=False)}, {}, {})


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> HostSums:
    """Nodes that add up at once; a total is its own reference."""
    monkeypatch.setattr(ray, "get", lambda reference: reference.value)

    def add_up(members: int, before: Any, parts: list[Any]) -> Any:
        earlier = before.value if before is not None else {}
        return SimpleNamespace(value=added_up(members, [earlier, *(part.value for part in parts)]))

    class Reference(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    actor = SimpleNamespace(add_up=SimpleNamespace(remote=lambda *args: Reference(value=add_up(*args).value)))
    return HostSums(SimpleNamespace(actor=lambda node: actor))  # type: ignore[arg-type]


@pytest.mark.parametrize("fold", [2, 100])
def test_each_sum_has_the_uploads_of_its_own_tasks(sums, fold, monkeypatch):
    """As in asynchronous rounds, where clients of several updates train at the same time."""
    monkeypatch.setattr(host_sums, "FOLD", fold)
    rng = np.random.default_rng(0)
    cohorts = {3: rng.normal(size=(4, WIDTH)), 5: rng.normal(size=(2, WIDTH)), 9: rng.normal(size=(1, WIDTH))}
    for place in range(4):
        for of, rows in cohorts.items():
            for node in ("a", "b"):
                if place < len(rows) and (place % 2 == 0) == (node == "a"):
                    part = SimpleNamespace(value=Sums(y={(0, place): rows[place].copy()}))
                    sums.hold(node, task_of(place, len(rows), of), result_of(), part, 10)
    assert sums.ask({"b"}) == {"a"}
    assert sums.pending
    assert sums.ask(set()) == {"b"}
    found: dict[int, np.ndarray] = {of: np.zeros(WIDTH) for of in cohorts}
    seen = []
    for reference in list(sums.coming):
        for task, result in sums.take(reference):
            seen.append((task.sum, task.start))
            assert task.members == len(cohorts[task.sum])
            for value in result.sums["y"].nodes.values():
                found[task.sum] += value
    assert not sums.pending
    assert sorted(seen) == [(of, place) for of, rows in cohorts.items() for place in range(len(rows))]
    for of, rows in cohorts.items():
        np.testing.assert_allclose(found[of], rows.sum(axis=0))
