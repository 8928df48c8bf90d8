"""A run folder is never taken for a run of other data, another model, loss, metric or algorithm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fedray
from fedray.config import load
from fedray.data.sources.user_data import user_source
from fedray.engine.opening import open_run
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.tuning import tune
from fedray.tuning.recorded import check_record
from fedray.tuning.spec import read_sweeps
from fedray.tuning.trial import Assignment, TrialEnd, TrialThread

SETTINGS = {
    "engine.kind": "local", "algorithm.name": "fedavg", "data.clients": 4, "run.rounds": 2, "train.local_steps": 2,
    "train.batch_size": 8, "run.name": "run",
}  # fmt: skip


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)


TRAIN, TEST = samples(200, 1), samples(60, 2)


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Doubled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.layer(x)


def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def negated(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -nn.functional.cross_entropy(logits, targets, reduction="none")


def right(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == targets).float()


def wrong(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) != targets).float()


def filled(value: float) -> Net:
    net = Net()
    with torch.no_grad():
        net.layer.weight.fill_(value)
        net.layer.bias.zero_()
    return net


GIVEN: dict[str, Any] = {"data": TRAIN, "test": TEST, "model": Net, "loss": entropy, "metrics": {"right": right}}

OTHERS = {
    "labels": ({"data": (TRAIN[0], TRAIN[1][::-1].copy())}, "training data"),
    "inputs": ({"data": (TRAIN[0] * 2, TRAIN[1])}, "training data"),
    "test labels": ({"test": (TEST[0], TEST[1][::-1].copy())}, "test data"),
    "the model's code": ({"model": Doubled}, "(model.name, )?code of the model"),
    "the loss": ({"loss": negated}, "loss"),
    "a metric": ({"metrics": {"right": wrong}}, "metric right"),
    "another metric": ({"metrics": {"right": right, "wrong": wrong}}, "metric wrong"),
    "no loss": ({"loss": None}, "loss"),
}


@pytest.mark.parametrize("rounds", [2, 4], ids=["finished", "extended"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_something_else_is_refused_and_names_it(other: str, rounds: int, tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    first = fedray.simulate(settings, **GIVEN)
    again = fedray.simulate(settings, **GIVEN)
    assert again.summary == first.summary
    changes, name = OTHERS[other]
    before = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=rf"\({name}.* differs?\): use run.resume=false") as raised:
        fedray.simulate({**settings, "run.rounds": rounds}, **{**GIVEN, **changes})
    assert "\n" not in str(raised.value)
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before
    anew = fedray.simulate({**settings, "run.resume": False}, **{**GIVEN, **changes})
    assert (tmp_path / "run.bak-1").is_dir()
    assert anew.summary["status"] == "completed"


def test_the_weights_of_a_model_that_is_given_as_an_object(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    fedray.simulate(settings, data=TRAIN, test=TEST, model=filled(0.1))
    fedray.simulate(settings, data=TRAIN, test=TEST, model=filled(0.1).eval())
    with pytest.raises(UserError, match=r"\(initialisation of the model differs\)"):
        fedray.simulate(settings, data=TRAIN, test=TEST, model=filled(0.2))


def test_whose_a_sample_is(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.output": str(tmp_path), "data.partition.kind": "natural"}
    owners = np.arange(200) % 4
    fedray.simulate(settings, data=(*TRAIN, owners), test=TEST, model=Net)
    with pytest.raises(UserError, match="client assignment"):
        fedray.simulate(settings, data=(*TRAIN, owners[::-1].copy()), test=TEST, model=Net)


def write_npz(path: Path, **changes: np.ndarray) -> None:
    arrays = {"x_train": TRAIN[0], "y_train": TRAIN[1], "x_test": TEST[0], "y_test": TEST[1], **changes}
    np.savez(path, **arrays)


def test_a_replaced_file_even_of_the_same_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data.npz"
    write_npz(path)
    settings = {**SETTINGS, "run.output": str(tmp_path), "data.source": "npz", "model.name": "logistic"}
    settings |= {"data.root": str(path), "model.init": "zeros"}
    first = fedray.simulate(settings)
    before = path.stat()
    write_npz(path, y_test=TEST[1][::-1].copy())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(UserError, match=r"\(test data differs\)"):
        fedray.simulate(settings)
    write_npz(path)
    moved = path.rename(tmp_path / "moved.npz")
    assert fedray.simulate({**settings, "data.root": str(moved)}).summary == first.summary


def test_an_edited_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "from fedray.algorithms.fedprox import FedProx\nimport {helper}\n\n\nclass Mine(FedProx):\n"
        "    def step(self, client, carry, batch):\n"
        "        carry = super().step(client, carry, batch)\n"
        "        y = carry['y']\n"
        "        return carry.update(y=y.with_parameters(y.parameters * {helper}.factor()))\n"
    )
    settings = {**SETTINGS, "run.output": str(tmp_path), "algorithm.name": "edited_mine:Mine"}

    def run(algorithm: str, helper: str) -> None:
        (tmp_path / "edited_mine.py").write_text(algorithm)
        (tmp_path / "edited_helper.py").write_text(helper)
        for name in ("edited_mine", "edited_helper"):
            sys.modules.pop(name, None)
        # two versions may be written within one tick of the clock by which Python knows its own caches
        for cached in tmp_path.glob("__pycache__/edited_*"):
            cached.unlink()
        fedray.simulate(settings, data=TRAIN, test=TEST, model=Net)

    algorithm = text.format(helper="edited_helper")
    run(algorithm, "def factor():\n    return 1.0\n")
    run("# a remark changes nothing\n" + algorithm, "\n\ndef factor():\n    return 1.0\n")
    with pytest.raises(UserError, match=r"\(code of the algorithm differs\)"):
        run(algorithm.replace("parameters * ", "parameters + "), "def factor():\n    return 1.0\n")
    with pytest.raises(UserError, match=r"\(code of the algorithm differs\)"):
        run(algorithm, "def factor():\n    return 0.5\n")


def test_a_folder_that_does_not_say_what_it_was_made_from(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    first = fedray.simulate(settings, **GIVEN)
    (first.folder / "inputs.json").unlink()
    with pytest.raises(UserError, match=r"has no inputs.json.* run.resume=true takes it for the same run"):
        fedray.simulate(settings, **GIVEN)
    assert fedray.simulate({**settings, "run.resume": True}, **GIVEN).summary == first.summary
    for damaged, words in (("{}", "holds another run"), ("[]", "is damaged"), ("", "is damaged")):
        (first.folder / "inputs.json").write_text(damaged)
        with pytest.raises(UserError, match=words):
            fedray.simulate(settings, **GIVEN)
    (first.folder / "inputs.json").unlink()
    longer = fedray.simulate({**settings, "run.resume": True, "run.rounds": 3}, **GIVEN)
    assert fedray.simulate({**settings, "run.rounds": 3}, **GIVEN).summary == longer.summary


def test_frozen_layers_are_part_of_the_model(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    fedray.simulate(settings, data=TRAIN, test=TEST, model=filled(0.1))
    frozen = filled(0.1)
    frozen.layer.weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"holds another run \(.*initialisation of the model"):
        fedray.simulate(settings, data=TRAIN, test=TEST, model=frozen)


SPACE: dict[str, Any] = {
    "base": {key: value for key, value in SETTINGS.items() if key != "run.name"} | {"data.validation_samples": 40},
    "spaces": {"wide": {"train.lr": {"uniform": [0.01, 0.5]}}},
}


@pytest.fixture(scope="module")
def swept(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    output = tmp_path_factory.mktemp("sweeps")
    options = ["tune.trials=2", "tune.name=mine", f"tune.output={output}", "tune.max_concurrent_trials=1"]
    tune(SPACE, options, **GIVEN)
    return output / "mine", options


@pytest.mark.parametrize("other", OTHERS)
def test_a_sweep_of_something_else_is_refused(other: str, swept: tuple[Path, list[str]]) -> None:
    _, options = swept
    tune(SPACE, options, **GIVEN)
    changes, name = OTHERS[other]
    with pytest.raises(UserError, match=rf"holds another sweep \({name}"):
        tune(SPACE, options, **{**GIVEN, **changes})


def test_the_best_of_a_sweep_of_ones_own_data_says_what_it_needs(swept: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = swept
    best = folder / "best.yaml"
    for missing in ("data", "model", "loss", "metrics"):
        without = {missing, "test"} if missing == "data" else {missing}
        given = {name: value for name, value in GIVEN.items() if name not in without}
        with pytest.raises(UserError, match=f"made with {missing}= given from Python") as raised:
            fedray.simulate(best, overrides=[f"run.output={tmp_path}"], **given)
        assert "\n" not in str(raised.value)
    assert fedray.simulate(best, overrides=[f"run.output={tmp_path}"], **GIVEN).summary["status"] == "completed"


def test_a_report_is_of_what_was_run(swept: tuple[Path, list[str]]) -> None:
    folder, options = swept
    (same,) = read_sweeps(SPACE, options)
    check_record(same)
    (again,) = read_sweeps(folder)
    check_record(again)
    for change, name in (("train.momentum=0.9", "train.momentum"), ("run.rounds=50", "run.rounds")):
        (other,) = read_sweeps(SPACE, [*options, change])
        with pytest.raises(UserError, match=rf"holds another sweep \({name} differs\): a report is of what was run"):
            check_record(other)


def test_a_sweep_that_does_not_say_what_it_was_made_from(swept: tuple[Path, list[str]]) -> None:
    folder, options = swept
    record = folder / "sweep.yaml"
    whole = record.read_text()
    without = {name: value for name, value in yaml.safe_load(whole).items() if name != "inputs"}
    record.write_text(yaml.safe_dump(without, sort_keys=False))
    with pytest.raises(UserError, match=r"does not say what its trials were made from: tune.resume=true"):
        tune(SPACE, options, **GIVEN)
    tune(SPACE, [*options, "tune.resume=true"], **GIVEN)
    assert yaml.safe_load(record.read_text()) == yaml.safe_load(whole)


MODELS = """
from torch import nn


def small(input_shape, classes):
    return nn.Linear(input_shape[0], classes)


def scaled(input_shape, classes):
    return nn.Sequential(nn.Linear(input_shape[0], classes), nn.Threshold(-{limit}, 0.0))
"""


def test_models_that_are_searched_are_compared_too(ray_cluster: None, tmp_path: Path) -> None:
    path = tmp_path / "searched_models.py"
    path.write_text(MODELS.format(limit=1))
    names = [f"{path}:small", f"{path}:scaled"]
    space = {"base": {**SPACE["base"], "model.name": names[0]}, "spaces": {"s": {"model.name": {"choice": names}}}}
    options = ["tune.trials=1", "tune.name=models", f"tune.output={tmp_path}"]
    tune(space, options, data=TRAIN, test=TEST)
    tune(space, options, data=TRAIN, test=TEST)
    path.write_text(MODELS.format(limit=2))
    with pytest.raises(UserError, match=r"holds another sweep \(model .*:scaled differs\)"):
        tune(space, options, data=TRAIN, test=TEST)


@pytest.mark.slow
def test_trials_of_a_named_source_need_nothing_from_python(ray_cluster: None, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    write_npz(path)
    base = {**SPACE["base"], "data.source": "npz", "data.root": str(path), "model.name": "logistic"}
    options = ["tune.trials=1", "tune.name=named", f"tune.output={tmp_path}"]
    (result,) = tune({**SPACE, "base": base}, options)
    run = fedray.simulate(result.best[0], overrides=[f"run.output={tmp_path}/runs"])
    assert run.summary["status"] == "completed"
    write_npz(path, y_train=TRAIN[1][::-1].copy())
    with pytest.raises(UserError, match=r"holds another sweep \(training data, partition differ\)"):
        tune({**SPACE, "base": base}, options)


def test_a_run_that_another_process_finished_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    """Two processes may find an unfinished run; the one that gets the folder later must not begin it anew."""
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    first = fedray.simulate(settings, **GIVEN)
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    own = CustomObjects(user_source(TRAIN, TEST), Net, entropy, {"right": right})
    experiment, data = resolve(load(settings), own)
    with open_run(experiment, data, lambda worker: pytest.fail("a pool was made"), concurrent=False) as simulation:
        assert simulation is None
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before


def test_a_trial_begins_when_it_is_first_asked_for(tmp_path: Path) -> None:
    """Tune may make a process for a trial and then let another one run it."""
    settings = {**SETTINGS, "run.output": str(tmp_path)}
    own = CustomObjects(user_source(TRAIN, TEST), Net)
    assignment = Assignment("0", [settings], "test_accuracy", "rounds", 2)
    never = TrialThread(assignment, own, lambda: False)
    never.stop()
    assert not (tmp_path / "run").exists()
    trial = TrialThread(assignment, own, lambda: False)
    told = [trial.next_message()]
    while not isinstance(told[-1], TrialEnd):
        told.append(trial.next_message())
    assert told[-1] == TrialEnd()
    trial.stop()
