"""The contract tests fail for algorithms that break what they test."""

from __future__ import annotations

from typing import Any

import pytest

from fedray.algorithms.base import Traffic
from fedray.algorithms.fedavg import FedAvg
from fedray.testing import AlgorithmContract


class TrainsNothing(FedAvg):
    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        after = client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch))
        return after.update(y=carry["y"])


class WithoutTheOptimizer(FedAvg):
    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        gradient = client.objective.gradient(carry["y"], batch)
        return carry.update(y=carry["y"].moved(gradient, -client.lr))


class CountsTooMuch(FedAvg):
    traffic = Traffic(models_down=7)


class CountsNothing(FedAvg):
    traffic = Traffic(models_up=0)


class RemembersOnItself(FedAvg):
    """Keeps what lasts where no checkpoint finds it."""

    before = None

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        x = server["x"]
        super().server_update(server, phase, sums, scalars)
        if self.before is not None:
            server["x"] = server["x"].lerp(self.before, 0.1)
        self.before = x


@pytest.mark.parametrize(
    ("rule", "test", "message"),
    [
        (TrainsNothing, "steps_of_the_optimizer", "a step must return the model that it makes"),
        (WithoutTheOptimizer, "steps_of_the_optimizer", "clients make no step of client.optimizer"),
        (CountsTooMuch, "phase_outputs", "which are not broadcast"),
        (CountsNothing, "phase_outputs", "traffic counts nothing that clients upload"),
        (RemembersOnItself, "resume_equality", "what lasts must be in"),
    ],
)
def test_a_wrong_rule_fails(rule: type[FedAvg], test: str, message: str, tmp_path: Any) -> None:
    class Contract(AlgorithmContract):
        __test__ = False
        algorithm = f"{__name__}:{rule.__name__}"

    with pytest.raises(AssertionError, match=message):
        getattr(Contract(), f"test_{test}")(tmp_path)
