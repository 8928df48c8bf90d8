"""How much memory the server needs for uploads that it gathers is said before the first round."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from small_runs import run

from fedray import Simulation, simulate
from fedray.algorithms import Broadcast, Result, Upload, known_algorithms
from fedray.algorithms.fedavg import FedAvg
from fedray.engine import gathering
from fedray.engine.gathering import may_gather
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.usercode.importing import import_object


class Gathering(FedAvg):
    """FedAvg whose server takes the mean itself."""

    def end(self, client: Any, carry: Any) -> Result:
        return Result({"d": Upload.gather(carry["y"] - client.start("x")), "n": Upload.gather(client.n)})

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = server["x"] + sums["d"].mean(0)


class InTwoPhases(FedAvg):
    """FedAvg whose clients send their models after the server has answered their updates, of which it keeps a sum that
    it writes in place, and how often each client has sent one."""

    phases = ("train", "again")

    def init_server(self, server: Any) -> None:
        server["m"] = server["x"].zeros()

    def broadcast(self, server: Any, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"]} if phase == "train" else {"m": server["m"]})

    def train(self, client: Any) -> Result:
        found = super().train(client)
        return Result(found.uploads, kept={"y": client.trained})

    def again(self, client: Any) -> Result:
        return Result({"z": Upload.gather(client.kept["y"].parameters - client.shared["m"])})

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        if phase == "train":
            server["m"].add_(sums["y"] - server["x"] + 0.01)
            sent = server.column("sent")
            sent |= {client: sent.get(client, 0) + 1 for client in server.cohort.ids}
        else:
            often = sum(server.column("sent").values())
            server["x"] = server["x"].with_parameters(server["m"] / often + sums["z"].mean(0))


class Failing(Gathering):
    """Needs a local step."""

    def end(self, client: Any, carry: Any) -> Result:
        assert client.J.min() > 0
        return super().end(client, carry)


class Stateful(Gathering):
    client_state = ("c",)

    def end(self, client: Any, carry: Any) -> Result:
        found = super().end(client, carry)
        return Result(found.uploads, state={"c": client.state["c"] + 1})


class Counting(Gathering):
    """Counts in an attribute how often its broadcast was asked for, and moves less the more often it was."""

    asked = 0

    def broadcast(self, server: Any, phase: str) -> Broadcast:
        self.asked += 1
        return super().broadcast(server, phase)

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = server["x"] + sums["d"].mean(0) / self.asked


WIDTH = 144
"""How many numbers the small run's vectors and models have, with what fills their rows up to 64 bytes."""


def line(phase: str, name: str, width: int, members: int = 5) -> str:
    return f"{phase}: the server gathers {name} of {members} clients, {4 * members * width / 1e9:.3g} GB"


CASES = [
    ("Gathering", {}, [line("train", "d", WIDTH)]),
    ("Stateful", {"train.cohort_size": 3}, [line("train", "d", WIDTH, 3)]),
    ("Counting", {}, [line("train", "d", WIDTH)]),
    ("InTwoPhases", {}, [line("again", "z", WIDTH)]),
    ("Failing", {}, [
        f"the server may gather models or vectors of 5 clients, {20 * WIDTH / 1e9:.3g} GB for each with as many "
        "numbers as the model",
    ]),
    ("fedavg", {"train.aggregation": {"kind": "median"}}, [line("train", "y", WIDTH) + gathering.FOR_RULE]),
    ("fedavg", {"run.eval_local_models": True}, [
        f"run.eval_local_models: every process gathers the models of 5 clients, {20 * WIDTH / 1e9:.3g} GB",
    ]),
    ("fedavg", {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "keys", "expected"), CASES, ids=[each[0] for each in CASES])
def test_it_is_said_before_the_first_round(
    algorithm: str, keys: dict[str, Any], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large uploads only: the numbers of samples are small. The run is that which it would have been."""
    name = algorithm if algorithm.islower() else f"{__name__}:{algorithm}"
    config = {**SETTINGS, "algorithm.name": name, "run.rounds": 3, **keys}
    monkeypatch.setattr(gathering, "SMALL", 4 * 5 * 2)
    with Simulation({**config, "run.output": str(tmp_path / "told")}, data=small_source()) as told:
        assert told.round == 0
        said = [each.split(" ", 2)[2] for each in (told.folder / "log.txt").read_text().splitlines()]
        assert [each for each in said if "gather" in each] == expected
        list(told)
    monkeypatch.setattr("fedray.engine.opening.lines_on_memory", lambda *arguments: [])
    silent = simulate({**config, "run.output": str(tmp_path / "silent")}, data=small_source())
    assert_same(told.result, silent)


def test_small_uploads_need_no_line(tmp_path: Path) -> None:
    made = run(tmp_path, algorithm=f"{__name__}:Gathering", run__rounds=1)
    assert "gathers" not in (made.folder / "log.txt").read_text()


def test_who_may_gather(tmp_path: Path) -> None:
    """None of the algorithms that come with fedray do, which would not be found."""
    for cls in known_algorithms().values():
        assert "Upload.gather" not in Path(inspect.getfile(cls)).read_text()
        assert not may_gather(cls())
    assert may_gather(Gathering())
    for name, code, expected in USERS:
        file = tmp_path / f"{name}.py"
        file.write_text(BEFORE + code)
        assert may_gather(import_object(f"{file}:Mine", "algorithm.name")()) == expected, name


BEFORE = """
import torch
from fedray.algorithms import Upload
from fedray.algorithms.fedavg import FedAvg
"""
USERS = [
    ("none", "class Mine(FedAvg):\n    gathers = 'gather'\n", False),
    ("static", "class Mine(FedAvg):\n    @staticmethod\n    def all(v):\n        return Upload.gather(v)\n", True),
    ("helper", "def all_of(v):\n    return Upload.gather(v)\nclass Mine(FedAvg): ...\n", True),
    ("inner", "class Mine(FedAvg):\n    def end(self, c, y):\n        return [Upload.gather(v) for v in y]\n", True),
    ("decorated", "class Mine(FedAvg):\n    @torch.no_grad()\n    def end(self, y):\n        Upload.gather(y)\n", True),
]  # fmt: skip
"""Files of users, and whether their algorithms may gather."""
