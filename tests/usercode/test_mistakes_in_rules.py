"""Mistakes in a user's algorithm are said where they are made, with the names that there are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from fedray import ClientError, FedrayWarning, ServerError, UserError, simulate
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import SETTINGS, small_source


class WritesIntoTheServersModel(FedAvg):
    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        client.shared["x"].parameters.mul_(0.9)
        return super().step(client, carry, batch)


class ReturnsNothing(FedAvg):
    def step(self, client: Any, carry: Any, batch: Any) -> Any:
        super().step(client, carry, batch)


class AsksForNoPartOfTheCarry(FedAvg):
    def end(self, client: Any, carry: Any) -> Any:
        return carry["z"]


class AsksForNoBroadcast(FedAvg):
    def begin(self, client: Any) -> Any:
        return client.shared["X"]


class AsksForNoUpload(FedAvg):
    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = sums["model"]


class AsksForNoVector(FedAvg):
    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["velocity"] = server["velocty"]


class MakesTheModelATensor(FedAvg):
    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = sums["y"].parameters


def as_it_is(method: Any) -> Any:
    @functools.wraps(method)
    def same(*given: Any) -> Any:
        return method(*given)

    return same


class Misspelt(FedAvg):
    def sever_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None: ...

    @as_it_is
    def end(self, client: Any, carry: Any) -> Any:
        self.steps()
        return super().end(client, carry)

    def steps(self) -> None: ...


def run_of(rule: type[FedAvg], folder: Path, **changes: Any) -> Any:
    settings = SETTINGS | {"algorithm.name": f"{__name__}:{rule.__name__}", "run.output": str(folder), "run.rounds": 1}
    return simulate(settings | changes, data=small_source())


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (
            WritesIntoTheServersModel,
            UserError,
            r"WritesIntoTheServersModel.train writes into client.shared\['x'\], which",
        ),
        (ReturnsNothing, ClientError, "a step must return a Carry, .* not NoneType"),
        (AsksForNoPartOfTheCarry, ClientError, r"the carry has no 'z' \(there are: y\)"),
        (AsksForNoBroadcast, ClientError, r"there is no 'X' \(did you mean 'x'\?\)"),
        (AsksForNoUpload, ServerError, r"there is no 'model' \(there are: y\)"),
        (AsksForNoVector, ServerError, r"the server has no 'velocty' \(there are: x\)"),
        (MakesTheModelATensor, ServerError, r"server\['x'\] is a model, and can't become a Tensor: .*with_parameters"),
    ],
)
@pytest.mark.parametrize("vectorize", [False, True])
def test_a_mistake_in_a_rule_is_said(
    rule: type[FedAvg], error: type[Exception], message: str, vectorize: bool, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run_of(rule, tmp_path, **{"engine.vectorize": vectorize})


def test_a_misspelt_method_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(FedrayWarning) as said:
        run_of(Misspelt, tmp_path)
    found = [str(each.message) for each in said if "never called" in str(each.message)]
    assert found == ["Misspelt.sever_update is never called (did you mean 'server_update'?)"]
