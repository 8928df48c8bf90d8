"""An error in what an algorithm does at the server says which rule failed, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedray import ServerError, UserError, simulate
from fedray.algorithms.fedavg import FedAvg
from fedray.cli.main import exit_code
from fedray.testing.contracts import SETTINGS, small_source


class Broken(FedAvg):
    """FedAvg, whose method ``broken`` fails in round 2, or before the first."""

    broken = ""

    def _fail(self, method: str, number: int) -> None:
        if method == self.broken and number in (0, 2):
            raise KeyError("no such thing")

    def init_server(self, server: Any) -> None:
        self._fail("init_server", server.round)
        super().init_server(server)

    def broadcast(self, server: Any, phase: str) -> Any:
        self._fail("broadcast", server.round)
        return super().broadcast(server, phase)

    def server_training(self, server: Any) -> Any:
        self._fail("server_training", server.round)
        return {}

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        self._fail("server_update", server.round)
        super().server_update(server, phase, sums, scalars)

    def eval_model(self, server: Any) -> Any:
        self._fail("eval_model", server.round)
        return super().eval_model(server)

    def further_models(self, server: Any) -> Any:
        self._fail("further_models", server.round)
        return super().further_models(server)

    def personal_broadcast(self, server: Any) -> Any:
        self._fail("personal_broadcast", server.round)
        return super().personal_broadcast(server)

    def personal_model(self, client: Any) -> Any:
        return client.start("x")


def broken(method: str) -> type[FedAvg]:
    return type("Mine", (Broken,), {"broken": method, "server_training_before": "train", "asynchronous": True})


WHEN = {
    "init_server": "failed before the first round",
    "broadcast": "for phase train failed in round 2",
    "server_training": "failed in round 2",
    "server_update": "for phase train failed in round 2",
    "eval_model": "failed in round 2",
    "further_models": "failed before the first round",
    "personal_broadcast": "failed in round 2",
}


def run(folder: Path, method: str, **keys: Any) -> Any:
    settings = {**SETTINGS, "run.output": str(folder)} | {key.replace("__", "."): keys[key] for key in keys}
    return simulate(settings, data=small_source(), algorithm=broken(method))


@pytest.mark.parametrize(("method", "when"), WHEN.items())
def test_the_rule_and_the_round_are_named(method: str, when: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught:
        run(tmp_path, method)
    first, *traceback = str(caught.value).splitlines()
    assert first.startswith(f"Mine.{method} {when} on ")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "KeyError: 'no such thing'"


def test_on_ray_it_is_the_same_error(tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"engine__kind": "ray", "engine__actors": 1, "engine__cpus_per_actor": 0.1}
    assert exit_code(lambda: run(tmp_path, "server_update", **keys)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("fedray: Mine.server_update for phase train failed in round 2 on ")
    assert [line for line in lines if line][-1] == "KeyError: 'no such thing'"
    assert not any("RayTaskError" in line for line in lines)


def test_a_rule_that_fails_before_the_first_round_leaves_its_folder_free(tmp_path: Path) -> None:
    with pytest.raises(ServerError):
        run(tmp_path, "init_server", run__name="mine")
    assert not (tmp_path / "mine").exists()
    assert run(tmp_path, "", run__name="mine").status == "completed"


def test_in_asynchronous_rounds(tmp_path: Path) -> None:
    keys = {"system__mode": "buffered", "system__concurrency": 8, "system__devices": "phone_mid"}
    with pytest.raises(ServerError, match=r"^Mine.server_update for phase train failed in round 2 on "):
        run(tmp_path, "server_update", **keys)


def test_what_explains_itself_passes(tmp_path: Path) -> None:
    class Refusing(FedAvg):
        def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
            raise UserError("not like this")

    with pytest.raises(UserError, match=r"^not like this$"):
        simulate({**SETTINGS, "run.output": str(tmp_path)}, data=small_source(), algorithm=Refusing)
