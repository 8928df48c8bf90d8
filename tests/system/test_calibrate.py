"""``fedray calibrate``: this machine's speed as a profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from command_runs import refused

from fedray import simulate
from fedray.cli.main import main

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")

SMALL = ["model.name=logistic", "data.clients=10", "train.batch_size=16"]


def test_a_profile_of_this_machine(capsys):
    assert main(["calibrate", *SMALL, "engine.threads=1", "--watts", "12.5", "--write", "mine.yaml"]) == 0
    shown = capsys.readouterr().out
    speed = re.match(r"(\S+) GFLOPs a second with logistic on 1 thread \(median of 5 rounds", shown)
    profile = yaml.safe_load(Path("mine.yaml").read_text())
    assert profile["flops_per_second"] == pytest.approx(float(speed[1]) * 1e9, rel=1e-3)
    assert profile["watts"] == 12.5
    keys = dict(word.split("=") for word in SMALL) | {
        "algorithm.name": "fedavg",
        "engine.kind": "local",
        "run.rounds": 1,
    }
    timed = simulate(keys | {"system.devices": "mine.yaml"})
    # a client makes 20 steps of 16 samples, each three passes over 784 x 10 multiply-adds
    flops = 20 * 16 * 3 * 2 * 7840
    assert timed.metrics.virtual_seconds[0] == pytest.approx(flops / profile["flops_per_second"])
    assert timed.metrics.joules[0] == pytest.approx(10 * 12.5 * flops / profile["flops_per_second"])
    Path("mine.yaml").write_text("watts: 3")
    with pytest.raises(Exception, match=r"system\.devices=.*mine\.yaml differs"):
        simulate(keys | {"system.devices": "mine.yaml", "run.resume": True, "run.rounds": 2})


def test_what_a_configuration_says_of_its_own_run_does_not_count(capsys):
    Path("mine.py").write_text("def early(report):\n    return True\n")
    keys = ["run.local_models_of=[1]", "run.local_models_in=[50]", "run.rounds=60", "run.diagnostics=all_clients"]
    keys += ["run.callbacks=[mine.py:early]", "run.stop_at={train_loss: 9}"]
    assert main(["calibrate", *SMALL, "engine.threads=1", *keys]) == 0
    assert "(median of 5 rounds" in capsys.readouterr().out


def test_bad_input(capsys):
    assert "--watts must be above 0, not -1" in refused(capsys, "--watts", "-1", command="calibrate", base=[])
    assert "must end with .yaml" in refused(capsys, "--write", "me.txt", command="calibrate", base=[])
    assert not list(Path().iterdir())
