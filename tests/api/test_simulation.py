"""A run that is stepped through has the bits of an unbroken one, and says what the user has changed by hand."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small_runs import run

from fedray import Report, Simulation, UserError, compare, simulate
from fedray.core.places import Places
from fedray.testing.contracts import SETTINGS, assert_same, small_source

ROUNDS = 6


def keys(folder: Path, algorithm: str = "fedavg", **changes: Any) -> dict[str, Any]:
    found = {**SETTINGS, "algorithm.name": algorithm, "run.rounds": ROUNDS, "run.output": str(folder)}
    return found | {key.replace("__", "."): value for key, value in changes.items()}


def stepped(folder: Path, algorithm: str = "fedavg", call: Any = None, **changes: Any) -> Simulation:
    return Simulation(keys(folder, algorithm, **changes), data=small_source(), **(call or {}))


def unbroken(folder: Path, algorithm: str = "fedavg", **changes: Any) -> Any:
    return run(folder, algorithm, run__rounds=ROUNDS, **changes)


def meddle() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def own_torch():
    threads = torch.get_num_threads()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("algorithm", ["scaffold", "pfedmo", "ghbm", "fedper"])
def test_steps_are_the_rounds_of_an_unbroken_run(tmp_path, algorithm):
    whole = unbroken(tmp_path / "whole", algorithm)
    seen: list[int] = []
    with stepped(tmp_path / "stepped", algorithm, {"callbacks": [lambda report: seen.append(report.round)]}) as sim:
        assert (sim.round, sim.rounds, sim.report) == (0, ROUNDS, None)
        for report in sim:
            rows = whole.clients[whole.clients["round"] == report.round]
            assert report.clients["client"].tolist() == rows["client"].tolist()
            # what the user does between rounds has no effect on them, and fedray leaves it as it is
            meddle()
            assert sim.round == report.round
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() == torch.float64
    assert seen == list(range(1, ROUNDS + 1))
    assert_same(whole, sim.result)
    assert sim.result.status == "completed"


def test_a_drawn_cohort_that_is_given_by_hand_changes_no_bit(tmp_path):
    whole = unbroken(tmp_path / "whole", "scaffold")
    drawn = whole.clients.groupby("round")["client"].apply(list)
    with stepped(tmp_path / "stepped", "scaffold") as sim:
        for number in range(1, ROUNDS + 1):
            report = sim.step(np.array(drawn[number])[::-1])
            assert report.clients["client"].tolist() == drawn[number]
    assert sim.result.summary["model_sha256"] == whole.summary["model_sha256"]


def test_the_server_has_the_mean_of_the_models_that_are_kept(tmp_path):
    with stepped(tmp_path, call={"keep_clients": True}, train__weighting="samples") as sim:
        report = sim.step(cohort=[1, 4, 6])
        sizes = report.clients.set_index("client")["samples"]
        models = {client: dict(report.client_model(client).named_parameters()) for client in (1, 4, 6)}
        for name, value in report.model().named_parameters():
            mean = sum(sizes[i] / sizes.sum() * models[i][name].double() for i in models)
            assert torch.allclose(value.double(), mean, atol=1e-7)
        report = sim.step(keep_clients=[])
        with pytest.raises(UserError, match=r"client 1 was not kept \(round 2 has none\)"):
            report.client_model(1)


def test_another_model_takes_the_place_of_the_servers(tmp_path):
    whole = unbroken(tmp_path / "whole")
    with stepped(tmp_path / "same") as sim:
        sim.step()
        sim.replace_model(sim.model())
        for _ in sim:
            pass
    assert sim.result.summary["model_sha256"] == whole.summary["model_sha256"]
    other = stepped(tmp_path / "other", train__lr=1e-9)
    other.step()
    wanted = {name: torch.randn_like(value) for name, value in other.model().state_dict().items()}
    other.replace_model(wanted)
    for name, value in other.model().state_dict().items():
        assert torch.equal(value, wanted[name])
    report = other.step()
    for name, value in report.model().named_parameters():
        assert torch.allclose(value, wanted[name], atol=1e-5)
    wrong = dict(wanted)
    wrong.pop(next(iter(wrong)))
    with pytest.raises(UserError, match=r"replace_model: model has no tensor"):
        other.replace_model(wrong)
    with pytest.raises(UserError, match="not finite"):
        other.replace_model({name: value * torch.nan for name, value in wanted.items()})
    other.close()


def test_what_is_changed_by_hand_is_in_the_folder(tmp_path):
    with stepped(tmp_path) as sim:
        sim.step()
        sim.step(cohort=[0, 1])
        sim.step(cohort=[0])
        sim.step([1])
        sim.replace_model(sim.model())
        sim.step()
        sim.replace_model(sim.model())
        with pytest.warns(UserWarning, match="the checkpoint does not have the model that replace_model got"):
            sim.save_checkpoint()
        with pytest.warns(UserWarning, match="was not used, as no round has followed"):
            sim.close()
    text = "model of round 5, cohort of rounds 2-4"
    assert json.loads((sim.folder / "inputs.json").read_text())["changed by hand"] == text
    assert "round 2: cohort given by hand" in (sim.folder / "log.txt").read_text()
    with pytest.raises(UserError, match=rf"changed by hand \({text}\).* go on with it as a fedray\.Simulation"):
        unbroken(tmp_path)
    with stepped(tmp_path) as again:
        assert [report.round for report in again] == [6]
        with pytest.raises(UserError, match="has ended"):
            again.step([0])
    changed = {str(number): ["cohort"] for number in (2, 3, 4)} | {"5": ["model"]}
    assert again.result.summary["by_hand"] == changed
    with pytest.raises(UserError, match="changed by hand"):
        unbroken(tmp_path)
    assert any("changed by hand" in note for note in compare(tmp_path).environments[0].notes)


def test_a_simulation_that_is_left_goes_on_later(tmp_path):
    whole = unbroken(tmp_path / "whole", "scaffold")
    with stepped(tmp_path / "left", "scaffold") as sim:
        sim.step()
        sim.step()
    assert sim.result.status == "interrupted"
    forgotten = stepped(tmp_path / "left", "scaffold")
    assert forgotten.step().round == 3
    del forgotten
    ended = run(tmp_path / "left", "scaffold", run__rounds=ROUNDS)
    assert_same(whole, ended)


def test_a_damaged_checkpoint_is_refused_and_nothing_is_lost(tmp_path):
    whole = unbroken(tmp_path / "whole", "scaffold")
    with stepped(tmp_path / "stepped", "scaffold", run__checkpoint_every=1, run__keep_checkpoints=5) as sim:
        for _ in range(4):
            sim.step()
        file = sim.folder / "checkpoints" / "round-00000002" / "server.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(UserError, match=r"round-00000002 is damaged .* the run stays where it is"):
            sim.load_checkpoint(2)
        sim.load_checkpoint(3)
        assert [report.round for report in sim] == [4, 5, 6]
    assert_same(whole, sim.result)


def test_going_back_to_a_checkpoint(tmp_path):
    whole = unbroken(tmp_path / "whole", "scaffold")
    with stepped(tmp_path / "stepped", "scaffold", run__checkpoint_every=1, run__keep_checkpoints=1) as sim:
        sim.step()
        assert sim.save_checkpoint() == 1
        for _ in range(3):
            sim.step([0, 1])
        last = sim.report
        with pytest.raises(UserError, match=r"takes a round with a checkpoint in .* \(1, 4\), not 2$"):
            sim.load_checkpoint(2)
        sim.load_checkpoint(1)
        assert (sim.round, sim.report) == (1, None)
        sim.step()
        sim.load_checkpoint(1)
        with pytest.raises(UserError, match="the model of round 4 can be asked for only until the next step"):
            last.model()
        seen = [report for report in sim]
        assert [report.round for report in seen] == [2, 3, 4, 5, 6]
        for old in (last, *seen[:-1]):
            with pytest.raises(UserError, match="only until the next step"):
                _ = old.clients
    assert_same(whole, sim.result)
    assert "changed by hand" not in (sim.folder / "inputs.json").read_text()


def test_ctrl_c_ends_a_step_and_not_the_simulation(tmp_path):
    whole = unbroken(tmp_path / "whole")

    def press(report: Report) -> None:
        if report.round == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with stepped(tmp_path / "stepped", call={"callbacks": [press]}) as sim:
        with pytest.warns(UserWarning, match="stopping after this round"), pytest.raises(KeyboardInterrupt):
            for _ in sim:
                pass
        assert signal.getsignal(signal.SIGINT) is before
        assert sim.report.round == 3
        assert [report.round for report in sim] == [4, 5, 6]
    assert_same(whole, sim.result)


def test_a_callback_ends_the_run(tmp_path):
    with stepped(tmp_path, call={"callbacks": [lambda report: report.round == 2]}) as sim:
        assert [report.round for report in sim] == [1, 2]
        with pytest.raises(UserError, match="has ended after round 2"):
            sim.step()
    assert sim.result.status == "interrupted"


def test_a_finished_run_has_no_steps_left(tmp_path):
    whole = unbroken(tmp_path)
    with stepped(tmp_path) as sim:
        assert list(sim) == []
        with pytest.raises(UserError, match="has ended"):
            sim.step()
        with pytest.raises(UserError, match="has ended"):
            sim.model()
    assert sim.result.summary == whole.summary


def test_an_error_of_the_run_closes_the_simulation(tmp_path):
    def fail(report: Report) -> None:
        raise ValueError("mine")

    sim = stepped(tmp_path, call={"callbacks": [fail]})
    with pytest.raises(ValueError, match="mine"):
        sim.step()
    (summary,) = tmp_path.glob("*/summary.json")
    assert json.loads(summary.read_text())["status"] == "failed"
    with pytest.raises(UserError, match="the run has failed: mine"):
        sim.step()
    sim.close()
    # the folder is free, while the traceback is still there
    with stepped(tmp_path) as again:
        assert again.step().round == 1


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ([99], "client 99 does not exist or has no samples"),
        ([-1], "client -1 does not exist"),
        ([1, 1], "cohort names a client twice"),
        ([1.5], "must be numbers of clients"),
        ("ab", "must be numbers of clients"),
        (3, "must be numbers of clients"),
        ([], "at least one client"),
    ],
)
def test_a_cohort_that_is_not_possible(cohort, message, tmp_path):
    with stepped(tmp_path) as sim:
        with pytest.raises(UserError, match=message):
            sim.step(cohort)
        assert sim.step().round == 1


def test_methods_that_choose_clients_themselves_take_no_cohort(tmp_path):
    private = {"privacy.epsilon": 8, "privacy.delta": 1e-5, "privacy.clip": 1.0}
    buffered = {"system.mode": "buffered", "system.concurrency": 4, "system.flops_per_second": 1e9}
    for name, changes in {"privacy": private, "buffered": buffered}.items():
        with Simulation(keys(tmp_path / name) | changes, data=small_source()) as sim:
            sim.step()
            with pytest.raises(UserError, match=f"cohort does not go with .*{name}"):
                sim.step(cohort=[0])
    with (
        Simulation(keys(tmp_path / "buffered") | buffered, data=small_source()) as sim,
        pytest.raises(UserError, match=r"^keep_clients does not go with system.mode=buffered"),
    ):
        sim.step(keep_clients=True)


def test_a_result_before_the_end(tmp_path):
    sim = stepped(tmp_path)
    with pytest.raises(UserError, match=r"save_checkpoint: no round has been made yet"):
        sim.save_checkpoint()
    sim.step()
    with pytest.raises(UserError, match=r"no result before the simulation is closed"):
        _ = sim.result
    sim.close()
    assert sim.result.status == "interrupted"
    sim.close()


def kill_server(sim: Simulation) -> None:
    log = (sim.folder / "log.txt").read_text()
    os.kill(int(log.rpartition("server: pid ")[2].split()[0]), signal.SIGKILL)


def test_steps_on_ray_through_the_death_of_its_processes(ray_cluster, tmp_path):
    changes = {"engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.1, "run.checkpoint_every": 2}
    local = {"run.checkpoint_every": 2}
    with Simulation(keys(tmp_path / "local", "scaffold") | local, data=small_source()) as sim:
        for number in range(1, ROUNDS + 1):
            sim.step([0, number])
    wanted = sim.result.summary["model_sha256"]
    with Simulation(keys(tmp_path / "ray", "scaffold") | changes, data=small_source(), keep_clients=[0]) as sim:
        first = Places(sim.model()).tensors
        for number in range(1, ROUNDS + 1):
            report = sim.step([0, number])
            assert report.round == number
            assert report.client_model(0) is not None
            if number == 3:
                kill_server(sim)
        assert any(not torch.equal(value, first[name]) for name, value in Places(sim.model()).tensors.items())
        sim.save_checkpoint()
    assert sim.result.summary["model_sha256"] == wanted
    assert (sim.result.clients.groupby("round")["client"].apply(list) == [[0, n] for n in range(1, ROUNDS + 1)]).all()


def test_going_back_after_the_death_of_the_server(ray_cluster, tmp_path):
    changes = {"engine.kind": "ray", "engine.actors": 1, "engine.cpus_per_actor": 0.1, "run.checkpoint_every": 1}
    with Simulation(keys(tmp_path, "scaffold") | changes, data=small_source()) as sim:
        for _ in range(3):
            sim.step()
        kill_server(sim)
        sim.load_checkpoint(2)
        assert sim.round == 2
        assert sim.step().round == 3


def test_simulate_is_the_same_loop(tmp_path):
    shown: list[Report] = []
    result = simulate(keys(tmp_path), data=small_source(), callbacks=[shown.append])
    with pytest.raises(UserError, match="only while its callback is called"):
        shown[0].model()
    assert [report.round for report in shown] == result.metrics["round"].tolist()


def test_time_between_steps_is_no_time_of_the_run(tmp_path, monkeypatch):
    real, spent = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + spent[0])

    def think() -> None:
        spent[0] += 1000

    with stepped(tmp_path, engine__profile=True, run__checkpoint_every=1, run__rounds=4) as sim:
        for act in (sim.step, sim.step, sim.save_checkpoint, lambda: sim.load_checkpoint(1), sim.step, sim.step):
            think()
            act()
        think()
    result = sim.result
    assert result.metrics["round"].tolist() == [1, 2, 3]
    assert 0 < result.metrics["wall_seconds"].iloc[-1] < 500
    assert all(result.metrics["wall_seconds"].diff()[1:] > 0)
    profile = pd.read_csv(sim.folder / "profile.csv").drop(columns="round")
    assert (profile >= 0).all(axis=None)
    assert profile.sum(axis=None) < 500


def test_a_run_stays_where_it_is_when_the_working_directory_changes(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with stepped(Path("runs"), run__rounds=3) as sim:
        sim.step()
        monkeypatch.chdir("other")
        assert sim.step().model() is not None
        sim.save_checkpoint()
        sim.step()
        sim.load_checkpoint(2)
        sim.step()
    assert not any((tmp_path / "other").iterdir())
    assert sim.folder.parent == tmp_path / "runs"
    assert_same(sim.result, run(tmp_path / "whole", "fedavg", run__rounds=3))
