"""What a run says of keys that it reads otherwise than one may expect, and what it spells out where they are null."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import dump, resolve
from fedray.testing.contracts import SETTINGS, small_source

pytestmark = pytest.mark.cpu
"""With a GPU there would be a note of it beside those that are looked at."""

BASE = {"model.name": "logistic", "engine.kind": "local", "algorithm.name": "fedavg", "data.clients": 9}


def resolved(**keys):
    return resolve(load(BASE | keys), CustomObjects(small_source()))


def run(folder, **keys):
    return simulate(BASE | {"run.output": str(folder), "run.name": "run", "run.rounds": 4} | keys, data=small_source())


def test_iterations_that_local_steps_do_not_divide():
    keys = {"train.local_steps": 40, "run.iterations": 100}
    experiment, _ = resolved(**keys)
    assert experiment.rounds == 2
    assert experiment.notes == (
        "warning: run.iterations=100 is not a multiple of train.local_steps=40: 2 rounds of 40 make 80 iterations",
    )
    assert resolved(**keys | {"run.iterations": 120})[0].notes == ()


def test_a_public_set_that_auto_takes_from_the_clients_is_said_with_the_way_to_compare():
    experiment, data = resolved(**{"algorithm.name": "pfedmo"})
    assert experiment.notes == (
        "warning: data.public_samples=auto: 36 of the 360 training samples are the server's public set, and no "
        "client's; to compare with an algorithm that has none, give data.public_samples=36 in both runs",
    )
    alike, same = resolved(**{"data.public_samples": 36})
    assert alike.notes == ()
    assert same.partition_hash == data.partition_hash
    assert np.array_equal(same.public, data.public)
    assert resolved(**{"algorithm.name": "pfedmo", "data.public_samples": 36})[0].notes == ()
    assert resolved()[1].partition_hash != data.partition_hash


FIVE_CLASSES = Source("five", np.zeros((100, 2), np.float32), np.arange(100) % 5, np.zeros((5, 2)), np.arange(5), 5)


@pytest.mark.parametrize(
    ("kind", "alpha", "clusters"),
    [("dirichlet", 0.5, None), ("dirichlet_fixed", 0.5, None), ("orthogonal", None, 5), ("iid", None, None)],
)
def test_the_options_of_a_partition_are_spelled_out(kind, alpha, clusters, tmp_path):
    own = CustomObjects(FIVE_CLASSES)
    experiment, data = resolve(load(BASE | {"data.partition.kind": kind}), own)
    found = experiment.config.data.partition
    assert (found.alpha, found.clusters, found.min_samples) == (alpha, clusters, 1)
    # what is written down means the same when it is read
    path = tmp_path / "config.yaml"
    path.write_text(dump(experiment.config))
    again, same = resolve(load(path), own)
    assert again.config == experiment.config
    assert same.partition_hash == data.partition_hash


@pytest.mark.parametrize(
    ("name", "keys", "key", "value"),
    [
        ("ghbm", {"train.cohort_size": 2}, "tau", 4),
        ("ghbm", {"train.cohort_size": 2, "algorithm.tau": 7}, "tau", 7),
        ("fedadc", {"algorithm.beta_g": 0.3}, "beta_l", 0.3),
        ("pfedmo", {"train.local_steps": 3, "data.public_samples": 36}, "rep_steps", 3),
        ("pfedmo", {"train.local_epochs": 1, "data.public_samples": 36}, "rep_steps", None),
    ],
)
def test_hyper_parameters_that_depend_on_others_are_spelled_out(name, keys, key, value):
    experiment, _ = resolved(**{"algorithm.name": name} | keys)
    assert getattr(experiment.algorithm.hyper, key) == value
    assert experiment.config.algorithm.model_dump()[key] == value


OLDER = {"data": {"partition": {"alpha": None, "min_samples": None}}, "algorithm": {"tau": None}}


def test_a_folder_in_which_they_were_null_is_finished(tmp_path):
    """As the version before wrote it."""
    keys = {"algorithm.name": "ghbm", "train.cohort_size": 3}
    whole = run(tmp_path / "whole", **keys)
    part = run(tmp_path / "part", **keys | {"run.rounds": 2})
    path = part.folder / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    assert settings["algorithm"]["tau"] == 3
    settings["algorithm"]["tau"] = None
    settings["data"]["partition"] |= OLDER["data"]["partition"]
    path.write_text(yaml.safe_dump(settings))
    longer = run(tmp_path / "part", **keys)
    assert longer.summary["model_sha256"] == whole.summary["model_sha256"]
    path.write_text(yaml.safe_dump(settings | {"run": settings["run"] | {"rounds": 4}}))
    # what null stood for may be given too, and nothing else
    run(tmp_path / "part", **keys | {"algorithm.tau": 3, "data.partition.alpha": 0.5})
    with pytest.raises(UserError, match=r"holds another run \(algorithm.tau differs\)"):
        run(tmp_path / "part", **keys | {"algorithm.tau": 2})


def test_a_resolved_configuration_is_the_same_run(tmp_path):
    for name in ("ghbm", "fedadc", "pfedmo"):
        first = run(tmp_path / name, **{"algorithm.name": name, "train.cohort_size": 3})
        settings = yaml.safe_load(Path(first.folder, "config.yaml").read_text())
        settings["run"]["output"] = str(tmp_path / "again" / name)
        again = simulate(settings, data=small_source())
        assert again.summary["model_sha256"] == first.summary["model_sha256"]


def test_warnings_of_what_a_paper_does_not_mean(tmp_path):
    """A run warns of client momentum where it lengthens the steps, and of FedHBM whose cohort is everybody."""

    def warnings(algorithm: str, **keys: Any) -> list[str]:
        config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(tmp_path), "run.rounds": 1, **keys}
        folder = simulate({**config, "run.resume": False}, data=small_source()).folder
        return [line for line in (folder / "log.txt").read_text().splitlines() if "warning" in line]

    (line,) = warnings("scaffold", **{"train.momentum": 0.9})
    assert "train.momentum=0.9" in line
    assert "up to 10 times" in line
    assert not warnings("fedtrip", **{"train.momentum": 0.9}) + warnings("scaffold") + warnings("fedhbm")
    (line,) = warnings("fedhbm", **{"train.cohort_size": 9})
    assert "the cohort is everybody" in line
