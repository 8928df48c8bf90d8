"""What a phase of one's own algorithm returns is checked: a mistake in it is an error, and not a wrong result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedray import UserError, simulate
from fedray.algorithms import Carry, ClientPhase, Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import SETTINGS, small_source


class Returning(FedAvg):
    """FedAvg whose clients also keep a vector ``d`` and a model ``last``, and return what ``change`` makes of it."""

    client_state = ("d",)
    client_models = ("last",)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        y = carry["y"]
        result = Result({"y": Upload.weighted_mean(y)}, state={"d": y.parameters, "last": y}, scalars={"n": client.n})
        return self.change(client, result)

    def change(self, client: ClientPhase, result: Result) -> Any:
        return result


def is_odd(client: ClientPhase) -> bool:
    return bool(client.stack.ids[0] % 2)


class StateOfSome(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, {} if is_odd(client) else result.state, result.scalars)


class PartOfTheState(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, {"d": result.state["d"]}, result.scalars)


class UndeclaredState(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, {**result.state, "e": result.state["d"]}, result.scalars)


class ModelForAVector(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, {**result.state, "d": result.state["last"]}, result.scalars)


class NarrowState(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, {**result.state, "d": torch.ones(client.size, 3)}, result.scalars)


class DoubleUpload(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        z = Upload.gather(torch.ones(client.size, 2, dtype=torch.float64))
        return Result({**result.uploads, "z": z}, result.state, result.scalars)


class UploadOfSome(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        more = {"z": Upload.sum(client.n)} if is_odd(client) else {}
        return Result({**result.uploads, **more}, result.state, result.scalars)


class UploadsOfUnequalWidths(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        z = Upload.sum(torch.ones(client.size, 2 if is_odd(client) else 3))
        return Result({**result.uploads, "z": z}, result.state, result.scalars)


class UnequalWeights(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        z = Upload.sum(client.n) if is_odd(client) else Upload.uniform_mean(client.n)
        return Result({**result.uploads, "z": z}, result.state, result.scalars)


class TooFewRows(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result({"y": Upload.weighted_mean(result.state["d"][:0])}, result.state, result.scalars)


class NoRows(Returning):
    def change(self, client: ClientPhase, result: Result) -> Result:
        return Result(result.uploads, result.state, {"n": client.n.sum()})


class Nothing(Returning):
    def change(self, client: ClientPhase, result: Result) -> None:
        return None


MISTAKES = {
    StateOfSome: r"must return the same for all clients, but state\['d'\] is .* for some and .* for others",
    PartOfTheState: r"state\['last'\] is missing; a phase returns all of a client's state, or none",
    UndeclaredState: r"state\['e'\] is not declared in client_state, client_models or client_numbers",
    ModelForAVector: r"state\['d'\] is a Model, but is declared in client_state",
    NarrowState: r"state\['d'\] must be \[C, 144\], but is \[C, 3\]",
    UploadOfSome: r"must return the same for all clients, but uploads\['z'\] is .* for some and .* for others",
    UploadsOfUnequalWidths: r"uploads\['z'\] is sum of a tensor \[C, .\] for some and sum of a tensor .* for others",
    UnequalWeights: r"uploads\['z'\] is .* for some and .* for others",
    DoubleUpload: r"uploads\['z'\] must be float32, not float64: \.float\(\)",
    TooFewRows: r"uploads\['y'\] must have one row for each of the stack's clients \(1\), but has shape \[0, 144\]",
    NoRows: r"scalars\['n'\] must have one row for each of the stack's clients \(1\), but has shape \[\]",
    Nothing: "must return a Result, not NoneType",
}


def run(algorithm: type, folder: Path, **changes: Any) -> Any:
    settings = {**SETTINGS, "algorithm.name": f"{__name__}:{algorithm.__name__}", "run.output": str(folder)}
    return simulate(settings | {key.replace("__", "."): value for key, value in changes.items()}, data=small_source())


@pytest.mark.parametrize("chunk", [1, 16], ids=["a task each", "one task"])
@pytest.mark.parametrize("algorithm", MISTAKES, ids=lambda algorithm: algorithm.__name__)
def test_a_mistake_names_algorithm_phase_and_key(algorithm: type, chunk: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{algorithm.__name__}\.train:? .*{MISTAKES[algorithm]}") as raised:
        run(algorithm, tmp_path, engine__chunk=chunk)
    assert "\n" not in str(raised.value)


def test_what_is_right_runs(tmp_path: Path) -> None:
    assert run(Returning, tmp_path).summary["status"] == "completed"
