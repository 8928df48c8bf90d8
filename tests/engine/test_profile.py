"""A profile says where the time of each round went, and all of it."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from small_runs import opened_run, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedray.core.stopwatch import Stopwatch
from fedray.tracking.columns import PURPOSES

TICK = 2.0**-10


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_profile_accounts_for_all_of_a_round(kind, tmp_path, request, monkeypatch):
    if kind == "ray":
        request.getfixturevalue("ray_cluster")
    else:
        # a clock that counts how often it is looked at, however fast the machine is
        ticks = itertools.count()
        monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * TICK)
    keys = {"engine__kind": kind, "engine__actors": 2, "engine__cpus_per_actor": 0.1, "engine__profile": True}
    result = run(tmp_path, "scaffold", run__rounds=5, run__checkpoint_every=2, **keys)
    profile = result.profile
    assert list(profile) == ["round", *PURPOSES]
    assert list(profile["round"]) == [1, 2, 3, 4, 5]
    whole = profile[list(PURPOSES)].sum(axis=1)
    wall = result.metrics["wall_seconds"]
    if kind == "local":
        # at the beginning of the run and of its first round
        assert whole.sum() == pytest.approx(wall.iloc[-1], abs=2 * TICK)
        np.testing.assert_allclose(whole[1:], wall.diff()[1:], atol=1e-9)
    else:
        assert 0.5 * wall.iloc[-1] < whole.sum() <= wall.iloc[-1] + 1e-3
    for purpose in ("data", "gradient", "algorithm", "transport"):
        assert (profile[purpose] > 0).all(), purpose
    # a round is evaluated at its end, on Ray beside the next one if no checkpoint waits for it
    assert (profile["evaluation"] > 0).sum() >= 3
    # the checkpoint after round 2 lies between the rows of rounds 2 and 3
    assert list(profile["checkpoint"] > 0) == [False, False, True, False, True]
    assert (profile > -0.002).all(axis=None)
    accumulator = EventAccumulator(str(result.folder))
    accumulator.Reload()
    found = [event.value for event in accumulator.Scalars("profile/gradient")]
    np.testing.assert_allclose(found, profile["gradient"], rtol=1e-6)


def test_a_profile_has_the_rounds_that_count(tmp_path):
    """A run that goes on keeps its profile, with or without profiling. One that starts over without it has none."""
    keys = {"run__checkpoint_every": 2, "engine__profile": True}

    def stopped_after_three(report):
        if report.round == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run(tmp_path, run__rounds=6, call={"callbacks": [stopped_after_three]}, **keys)
    result = run(tmp_path, run__rounds=6, **keys | {"engine__profile": False})
    assert list(result.profile["round"]) == [1, 2, 3, 4, 5, 6]
    result = run(tmp_path, run__rounds=6, run__resume=False, **keys | {"engine__profile": False})
    assert not (result.folder / "profile.csv").exists()


def test_the_servers_own_training_is_the_servers_time(tmp_path):
    """Locally the server trains before the clients do, in the process in which tasks are timed too."""
    result = run(tmp_path, algorithm__name="pfedmo", engine__kind="local", engine__profile=True, run__rounds=4)
    assert (result.profile[list(PURPOSES)] >= -1e-6).all(axis=None)
    assert (result.profile["server"] > 0).all()


def test_the_profile_table_names_every_purpose(tmp_path, monkeypatch, capsys):
    from fedray.cli.main import main

    monkeypatch.chdir(tmp_path)
    settings = ["model.name=logistic", "data.clients=4", "run.rounds=3", "engine.kind=local", "algorithm.name=fedavg"]
    # an option may stand between settings
    assert main(["run", *settings[:2], "--profile", *settings[2:]]) == 0
    shown = capsys.readouterr().out
    assert "seconds per round, mean of 2" in shown
    assert re.search(r"without round 1, which took \d+\.\d s\n", re.sub(r" +\n", "\n", shown))
    assert all(purpose in shown for purpose in PURPOSES)


@pytest.mark.parametrize("algorithm", ["fedavg", "moon", "fedsiam_da"])
def test_every_backward_pass_counts_as_one(algorithm, tmp_path, monkeypatch):
    """This holds for a loss that needs other models' features too."""
    plain, purposes = torch.autograd.grad, []
    for found in opened_run(tmp_path, algorithm):

        def watched(*args, **options):
            purposes.append(found.worker.clients.stopwatch._purposes[-1])  # noqa: B023
            return plain(*args, **options)

        monkeypatch.setattr(torch.autograd, "grad", watched)
        next(found.rounds())
    assert set(purposes) == {"gradient"}


def test_a_clock_counts_what_is_timed_within_something_else_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    stopwatch = Stopwatch()
    with stopwatch.on("outer"):
        with stopwatch.on("inner"):
            pass
        with stopwatch.on("inner"):
            pass
    assert stopwatch.take() == {"outer": 1.0 + 4.0 + 16.0, "inner": 2.0 + 8.0}
    assert stopwatch.take() == {}
