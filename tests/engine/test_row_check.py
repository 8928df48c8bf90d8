"""User-defined code that mixes clients which are trained together is told; code that does not is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import needs_compiler, run
from torch import Tensor

from fedray.algorithms import Carry, Result, find_algorithm, known_algorithms
from fedray.algorithms.fedavg import FedAvg
from fedray.core.upload import UploadStep

OF_CLIENTS = [
    name
    for name in known_algorithms()
    if name != "fedsiam_da"  # its head can't be stacked
    and any(
        getattr(find_algorithm(name), part) is not getattr(FedAvg, part) for part in ("begin", "step", "end", "train")
    )
]
"""The algorithms that come with fedray and do something else than FedAvg at clients."""

STACKS = {"engine__vectorize": True, "engine__chunk": 5}


class Sharp(FedAvg):
    """FedSAM with ``length(g)`` for ||g||."""

    length: Callable[[Tensor], Tensor]

    def step(self, client: Any, carry: Carry, batch: Any) -> Carry:
        y = carry["y"]
        g = client.objective.gradient(y, batch)
        g = client.objective.gradient(y + 0.05 * g / type(self).length(g), batch)
        return client.optimizer.descend(carry, "y", g)


class OfAll(Sharp):
    length = staticmethod(lambda g: g.norm())


class OfEach(Sharp):
    length = staticmethod(lambda g: g.norm(dim=-1, keepdim=True))


class Largest(Sharp):
    length = staticmethod(lambda g: g.abs().max())


class OfTheFirst(Sharp):
    length = staticmethod(lambda g: g[0].norm())


class Neighbour(Sharp):
    length = staticmethod(lambda g: g.norm(dim=-1, keepdim=True).roll(1, dims=0))


class InTheSecondPhase(FedAvg):
    """Mixes clients by what they keep of the first phase."""

    phases = ("look", "train")

    def look(self, client: Any) -> Result:
        return Result(kept={"g": client.objective.full_gradient(client.start("x"))})

    def step(self, client: Any, carry: Carry, batch: Any) -> Carry:
        gradient = client.objective.gradient(carry["y"], batch) + 0.1 * client.kept["g"].mean(dim=0)
        return client.optimizer.descend(carry, "y", gradient)

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        if phase == "train":
            super().server_update(server, phase, sums, scalars)


class InANumber(FedAvg):
    """Mixes clients in a number that they send."""

    def end(self, client: Any, carry: Carry) -> Result:
        moved = (carry["y"] - client.shared["x"]).abs()
        return replace(super().end(client, carry), scalars={"moved": moved.mean().expand(client.size, 1)})


class InAState(FedAvg):
    """Mixes clients in what they keep."""

    client_state = ("c",)

    def end(self, client: Any, carry: Carry) -> Result:
        c = client.state["c"] + (carry["y"] - client.shared["x"]).mean(dim=0)
        return replace(super().end(client, carry), state={"c": c})


def of_all(rows: Tensor, upload: Any) -> Tensor:
    return rows * (0.1 / rows.norm()).clamp(max=1)


def of_the_first(rows: Tensor, upload: Any) -> Tensor:
    return rows * (0.1 / rows[0].norm()).clamp(max=1)


def of_each(rows: Tensor, upload: Any) -> Tensor:
    return rows * (0.1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)


class Keeping(UploadStep):
    """Sends the signs of what it has, in place, and keeps the rest, of all rows or of each."""

    keeps = True

    def __init__(self, dim: int | None) -> None:
        self.dim = dim

    def __call__(self, rows: Tensor, upload: Any) -> Tensor:
        rows += upload.kept
        scale = rows.abs().mean() if self.dim is None else rows.abs().mean(dim=1, keepdim=True)
        sent = rows.sign() * scale
        upload.kept -= sent - rows
        return sent


def told(folder: Path, algorithm: type | None = None, **settings: Any) -> list[str]:
    """Returns what a run of stacks warns of mixed clients."""
    call = {"algorithm": algorithm} if algorithm else {"upload": settings.pop("steps")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(folder, call=call, **STACKS, **settings)
    return [str(each.message) for each in caught if "mixes clients" in str(each.message)]


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        (OfAll, "OfAll.train mixes clients that are trained together: it returns another uploads['y'] for"),
        (Largest, "Largest.train"),
        (OfTheFirst, "OfTheFirst.train"),
        (Neighbour, "Neighbour.train"),
        (InTheSecondPhase, "InTheSecondPhase.train"),
        (InANumber, "InANumber.train mixes clients that are trained together: it returns another scalars['moved']"),
        (InAState, "InAState.train mixes clients that are trained together: it returns another state['c']"),
    ],
)
def test_a_rule_that_mixes_clients_is_told_once(algorithm, where, tmp_path):
    (line,) = told(tmp_path, algorithm)
    assert line.startswith(where)
    assert "keepdim=True" in line


@pytest.mark.slow
@needs_compiler
def test_compiled_stacks_are_tried_too(tmp_path):
    """The client alone has a shape that is not compiled, so that the trial takes no longer."""
    (line,) = told(tmp_path, OfAll, engine__compile=True)
    assert line.startswith("OfAll.train")
    assert told(tmp_path / "each", OfEach, engine__compile=True) == []


@pytest.mark.parametrize("step", [of_all, of_the_first, Keeping(None)])
def test_a_step_of_uploads_that_mixes_clients_is_told_once(step, tmp_path):
    (line,) = told(tmp_path, steps=[{"clip": 1.0}, step])
    name = getattr(step, "__name__", "Keeping")
    assert line.startswith(f"the step {name} of train.upload mixes clients that are trained together: it makes another")


def test_steps_that_do_not_mix_clients_are_not_told(tmp_path):
    assert told(tmp_path, steps=[of_each, Keeping(1)]) == []


def test_one_after_another_nothing_is_mixed(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = run(tmp_path / "one", call={"algorithm": OfAll}, engine__vectorize=False)
    other = run(tmp_path / "other", call={"algorithm": OfEach}, engine__vectorize=False)
    assert one.summary["model_sha256"] == other.summary["model_sha256"]


@pytest.mark.parametrize("name", OF_CLIENTS)
def test_no_rule_that_comes_with_fedray_is_told(name, tmp_path):
    """As if a user had written it, with the settings that change most between steps."""
    mine = type("Mine", (find_algorithm(name),), {"__module__": __name__})
    settings = {"train__momentum": 0.9} if not find_algorithm(name).assumes_plain_sgd else {}
    assert told(tmp_path, mine, run__rounds=1, model__proj_dim=4, **settings) == []
