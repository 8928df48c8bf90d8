"""A trial has the processes that it asks for, or one line says why not; if one fails, the other trials go on."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from sweeps_on_ray import described, go, same_model, states, trials

from fedray.algorithms import Algorithm, Carry, Result, Upload, parameter
from fedray.config import load
from fedray.engine.ray.stored import store, store_source
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.resources import (
    bundles_of,
    count_concurrent_trials,
    device_of_trials,
    engine_of_trials,
    trials_per_gpu,
)
from fedray.tuning.view import View


class Touchy(Algorithm):
    """Local SGD that can't bear a large mu, and diverges with a negative one."""

    class Hyper(Algorithm.Hyper):
        mu: float = parameter(0.1, "mood")

    def begin(self, client):
        return Carry({"y": client.start("x")})

    def step(self, client, carry, batch):
        if self.hyper.mu > 0.5:
            raise ValueError("that is too much")
        scale = 1e30 if self.hyper.mu < 0 else 1.0
        return client.optimizer.descend(carry, "y", scale * client.objective.gradient(carry["y"], batch))

    def end(self, client, carry):
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(self, server, phase, sums, scalars):
        server["x"] = sums["y"]


def touchy(**more):
    grid = {"algorithm.mu": {"grid": [0.1, 0.9, -1.0, 0.2]}}
    return described(grid, algorithm__name="test_trial_processes:Touchy", **more)


def test_a_failed_trial_is_recorded_and_the_others_go_on(ray_cluster, tmp_path):
    result = go(tmp_path, sweep=touchy())
    assert states(result.folder) == ["complete", "failed", "diverged", "complete"]
    error = (result.folder / "trials/0001/error.txt").read_text()
    assert "that is too much" in error
    assert re.search(r"client \d+", error)
    table = result.trials
    assert table.loc[1, "error"] in error
    assert table["state"].tolist() == states(result.folder)
    # nothing left to do, but for those that failed
    assert len(trials(go(tmp_path, sweep=touchy()).folder)) == 4
    again = go(tmp_path, sweep=touchy(), retry_failed=True)
    assert states(again.folder) == ["complete", "failed", "diverged", "complete", "failed"]
    assert trials(again.folder)[4].params == trials(again.folder)[1].params


SLOW = described(train__local_epochs=8, run__rounds=16, run__checkpoint_every=1)
"""A sweep whose trials last long enough to be killed in the middle."""

SEVERAL = ("tune.trials=3", "tune.max_concurrent_trials=2")


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tmp_path_factory):
    """The folder of the slow sweep, whose processes nobody has killed."""
    return go(tmp_path_factory.mktemp("undisturbed"), *SEVERAL, sweep=SLOW).folder


def test_a_trial_whose_process_is_killed_goes_on(undisturbed, tmp_path):
    """It goes on from its last checkpoint in another process, to the same bits; the other trials notice nothing."""
    killed: list[int] = []

    class Killing(View):
        def progress(self) -> None:
            for sweep in self.sweeps:
                trial = sweep.running.get(1)
                if trial is not None and trial.step >= 5 and not killed:
                    log = (sweep.folder / "trials/0001/seed-0/log.txt").read_text()
                    killed.append(int(re.findall(r"server: pid (\d+)", log)[-1]))
                    os.kill(killed[0], signal.SIGKILL)

    broken = go(tmp_path, *SEVERAL, sweep=SLOW, view=Killing(quiet=True))
    assert killed
    assert states(broken.folder) == ["complete"] * 3
    log = (broken.folder / "trials/0001/seed-0/log.txt").read_text()
    assert "resuming" in log
    pids = {int(pid) for pid in re.findall(r"server: pid (\d+)", log)}
    assert killed[0] in pids
    assert len(pids) == 2
    for number in range(3):
        # which values the third one gets depends on who ended first
        if trials(undisturbed)[number].params == trials(broken.folder)[number].params:
            same_model(undisturbed, broken.folder, number)
    same_model(undisturbed, broken.folder, 1)


@pytest.mark.slow
def test_a_process_that_dies_between_two_trials(ray_cluster, tmp_path):
    """The trial for which the process was kept is started in another one."""

    class Killing(View):
        killed = 0

        def ended(self, sweep, number, trial, how) -> None:
            log = (sweep.folder / f"trials/{number:04d}/seed-0/log.txt").read_text()
            if number < 2:
                os.kill(int(re.findall(r"server: pid (\d+)", log)[-1]), signal.SIGKILL)
                self.killed += 1

    view = Killing(quiet=True)
    result = go(tmp_path, "tune.trials=3", "tune.max_concurrent_trials=1", view=view)
    assert view.killed == 2
    assert states(result.folder) == ["complete"] * 3


@pytest.mark.slow
def test_a_trial_whose_process_always_dies_fails_alone(ray_cluster, tmp_path):
    space = described({"algorithm.mu": {"grid": [0.1, 0.7]}}, algorithm__name="test_trial_processes:Deadly")
    result = go(tmp_path, "tune.max_concurrent_trials=1", sweep=space)
    assert states(result.folder) == ["complete", "failed"]
    error = (result.folder / "trials/0001/error.txt").read_text()
    assert re.fullmatch(r"its process died: .* \(4 times\)", error.splitlines()[-1])


class Deadly(Touchy):
    """Kills the process that it is in."""

    def step(self, client, carry, batch):
        if self.hyper.mu > 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(client, carry, batch)


@pytest.fixture(scope="module")
def crowded(ray_cluster, tmp_path_factory):
    """A sweep that asks for more trials at once than fit: its folder, and the lines that the user saw."""
    said: list[str] = []
    view = View(quiet=True, warn=said.append)
    options = ("tune.max_concurrent_trials=9", "tune.trials=3", "engine.cpus_per_actor=2")
    return go(tmp_path_factory.mktemp("crowded"), *options, view=view).folder, said


def test_fewer_at_once_than_asked_for_are_announced(crowded):
    folder, said = crowded
    assert "2 trials at once, not 9: a trial takes 2 CPU; the cluster has 4 CPU (4 free), 0 GPU (0 free)" in said
    assert states(folder) == ["complete"] * 3


@pytest.mark.slow
def test_trials_with_client_actors_of_their_own_side_by_side(crowded, tmp_path):
    """Two trials of two client actors each run at once on 4 processors, and give the bits of the local engine."""
    nested = ("engine.kind=ray", "engine.actors=2", "tune.trials=2", "tune.max_concurrent_trials=2")
    result = go(tmp_path, *nested)
    assert states(result.folder) == ["complete"] * 2
    for number in range(2):
        same_model(result.folder, crowded[0], number)
    log = (result.folder / "trials/0000/seed-0/log.txt").read_text()
    assert len(re.findall(r"client actor: pid", log)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_trials_at_once_with_client_actors_twenty_times(ray_cluster, tmp_path):
    """The four trials take all 4 processors, and none ever waits for those of another."""
    for turn in range(20):
        nested = ("engine.kind=ray", "engine.actors=1", "tune.trials=4", "tune.max_concurrent_trials=4", "run.rounds=2")
        assert states(go(tmp_path / str(turn), *nested).folder) == ["complete"] * 4


@pytest.mark.slow
def test_a_client_actor_of_a_trial_is_killed(undisturbed, tmp_path):
    """Another actor takes its place within the trial's own resources, as there are no others."""
    nested = ("engine.kind=ray", "engine.actors=2", "tune.trials=2", "tune.max_concurrent_trials=2")
    killed: list[int] = []

    class Killing(View):
        def progress(self) -> None:
            for sweep in self.sweeps:
                for number, trial in sweep.running.items():
                    if trial.step >= 4 and number == 0 and not killed:
                        log = (sweep.folder / "trials/0000/seed-0/log.txt").read_text()
                        killed.append(int(re.findall(r"client actor: pid (\d+)", log)[-1]))
                        os.kill(killed[0], signal.SIGKILL)

    result = go(tmp_path, *nested, sweep=SLOW, view=Killing(quiet=True))
    assert killed
    assert states(result.folder) == ["complete"] * 2
    assert "a client actor died" in (result.folder / "trials/0000/seed-0/log.txt").read_text()
    same_model(result.folder, undisturbed, 0)


def test_what_the_cluster_does_not_have_ends_in_one_line(ray_cluster, tmp_path):
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        go(tmp_path, "engine.start_timeout=3", "engine.gpus_per_actor=1")
    assert str(error.value).startswith(
        "no trial could be started in 3 s: a trial takes 1 CPU and 1 GPU; the cluster ha"
    )
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine.cpus_per_actor": 5}, "a trial takes 5 CPU; the cluster has 4 CPU"),
        ({"engine.kind": "ray", "engine.actors": 9}, "a trial takes 9 client actors of 1 CPU; the cluster has 4 CPU"),
    ],
)
def test_what_a_trial_takes_is_compared_with_what_there_is(settings, message, ray_cluster):
    found = engine_of_trials(load(settings).engine, settings, None)
    bundles = bundles_of(load({**settings, **found}).engine)
    with pytest.raises(UserError, match=f"a trial does not fit: {message}"):
        count_concurrent_trials(bundles, None, started_here=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine.server_gpus": 1}, "the servers have no GPU"),
        ({"engine.kind": "ray", "engine.actors": "per_client"}, "give a number of client actors"),
    ],
)
def test_what_a_sweep_can_not_arrange(settings, message, ray_cluster):
    with pytest.raises(UserError, match=message):
        engine_of_trials(load(settings).engine, settings, None)


@pytest.mark.parametrize(
    ("settings", "auto", "device", "share"),
    [
        ({}, "cpu", "cpu", None),
        ({}, "cuda", "cuda", "auto"),
        ({"engine.device": "cpu"}, "cuda", None, None),
        ({"engine.device": "cuda"}, "cpu", None, "auto"),
        ({"engine.actors_per_gpu": 2}, "cuda", "cuda", None),
        ({"engine.gpus_per_actor": 1}, "cpu", "cuda", None),
    ],
)
def test_trials_use_the_gpus_of_the_cluster(settings, auto, device, share, ray_cluster):
    found = engine_of_trials(load(settings).engine, settings, None, auto)
    assert (found.get("engine.device"), found.get("engine.actors_per_gpu")) == (device, share)


def test_a_sweep_stays_on_its_device(tmp_path):
    assert device_of_trials([], 2, False) == "cuda"
    assert device_of_trials([], 0, False) == "cpu"
    run = tmp_path / "trials" / "0000" / "seed-0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("engine: {device: cpu}\n")
    assert device_of_trials([run], 2, False) == "cuda", "a run without a finished round begins anew"
    (run / "metrics.csv").write_text("round\n1\n")
    assert device_of_trials([tmp_path / "other", run], 2, False) == "cpu"


def test_a_share_of_a_gpu_that_is_not_there(ray_cluster):
    with pytest.raises(UserError, match=r"the cluster has no GPU for the trials: use engine\.device=cpu"):
        trials_per_gpu({"engine.device": "cuda"}, CustomObjects(small_source()), print)


def test_samples_are_put_into_the_store_once(ray_cluster):
    """If a source came out of the store, what a trial's own engine stores of it is the same object."""
    stored = store_source(small_source())
    source = stored.get()
    assert not source.x_train.flags.writeable
    _, data = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), CustomObjects(source))
    again = store(data)
    assert again.samples == stored.samples
    received = again.get()
    assert all((getattr(received, name) == getattr(data, name)).all() for name in ("x", "y", "x_test", "y_test"))
    _, fresh = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), CustomObjects(small_source()))
    assert store(fresh).samples != stored.samples
