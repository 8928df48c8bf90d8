"""What a user hands over from Python is named in config.yaml, which every command reads again."""

from __future__ import annotations

import inspect
import math
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from ray import cloudpickle
from torch import nn

import fedray
from fedray import UserError, simulate
from fedray.algorithms import Algorithm
from fedray.algorithms.fedprox import FedProx
from fedray.cli.main import main
from fedray.cli.rerun import rerun
from fedray.config import Given, load
from fedray.core.upload import UploadRows
from fedray.experiment.custom import CustomObjects
from fedray.experiment.permissions import allows
from fedray.results.runs import RecordedRun, read_run
from fedray.robust import Attack, AttackedRows, Rule
from fedray.selection import Chosen, Known, Selection
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult


def made(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def margin(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.multi_margin_loss(logits, y, reduction="none")


def rolled(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.roll(int(torch.randint(5, ())), -1) for row in x])


def halved(rows: torch.Tensor, upload: UploadRows) -> torch.Tensor:
    return rows / 2


class Spread(Selection):
    """Takes every other client."""

    def choose(self, known: Known) -> Chosen:
        order = np.argsort(np.arange(len(known.ids)) % 2, kind="stable")
        return Chosen(known.ids[np.sort(order[: known.count])])


class First(Rule):
    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        return rows[:3].mean(dim=0)


class Opposite(Attack):
    def upload(self, rows: torch.Tensor, sent: AttackedRows) -> torch.Tensor:
        return -rows


NOTEBOOK = """
from fedray.algorithms import parameter
from fedray.algorithms.fedavg import FedAvg
from fedray.selection.uniform import Uniform

FACTOR = {factor}

class Keep(FedAvg):
    allows_aggregation = True

    class Hyper(FedAvg.Hyper):
        mu: float = parameter(0.5, "how much of the way is kept", ge=0)

    def server_update(self, server, phase, sums, scalars):
        x = server["x"]
        server["x"] = x + FACTOR * self.hyper.mu * (sums["y"] - x)

class Even(Uniform):
    uniform = True
"""


def in_a_notebook(factor: float = 1.0, name: str = "Keep") -> Any:
    """Returns a class as a notebook's cell defines it: in ``__main__``, where no other process finds it."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK.format(factor=factor), cell)
    return cell[name]


GIVEN: dict[str, Any] = {
    "data": lambda: small_source(), "model": lambda: made, "loss": lambda: margin, "metrics": lambda: {"gap": margin},
    "transform": lambda: rolled, "algorithm": in_a_notebook, "upload": lambda: [{"clip": 5.0}, halved],
    "sampling": Spread, "aggregation": lambda: First, "attack": Opposite,
}  # fmt: skip

PARTS = ["upload", "sampling", "aggregation", "attack"]
"""What test_given_parts.py looks at one by one."""

ALL = [*([name] for name in GIVEN if name not in PARTS), PARTS, [*GIVEN]]


def settings(folder: Path, given: list[str], **keys: Any) -> dict[str, Any]:
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    config = {**SETTINGS, "run.output": str(folder / "runs"), "run.name": "run", "run.rounds": 3, **changed}
    if "model" in given:
        config = {key: value for key, value in config.items() if not key.startswith("model.")}
    if {"upload", "aggregation", "attack"} & {*given} and "algorithm" not in given:
        config["algorithm.name"] = "fedavg"
    if "attack" in given:
        config["attack.fraction"] = 0.3
    if "data" not in given:
        config["data.source"] = "sample"
    return config


def run(folder: Path, given: list[str], **keys: Any) -> RunResult:
    return simulate(settings(folder, given, **keys), **{name: GIVEN[name]() for name in given})


def test_everything_that_is_handed_over_has_a_name_in_the_configuration():
    others = {"config", "test", "client_column", "label_column", "callbacks", "overrides", "verbose", "display"}
    arguments = [name for name in inspect.signature(simulate).parameters if name not in others]
    assert sorted(arguments) == sorted(get_args(Given)) == sorted(GIVEN)
    everything = {name: GIVEN[name]() for name in GIVEN}
    assert sorted(CustomObjects(everything.pop("data"), **everything).names) == sorted(GIVEN)
    for call in (fedray.tune, fedray.simulate_many, fedray.Simulation):
        assert sorted(name for name in inspect.signature(call).parameters if name in GIVEN) == sorted(GIVEN)


@pytest.mark.parametrize("given", ALL, ids="-".join)
def test_every_command_reads_the_configuration_again(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, given)
    file = result.folder / "config.yaml"
    assert sorted(load(file).run.given) == sorted(given)
    # read for comparisons
    assert isinstance(read_run(result.folder), RecordedRun)
    # refused where something is missing, in one line
    names = " and ".join(f"{name}=" for name in load(file).run.given)
    with pytest.raises(UserError, match=f"^run.given: this configuration was made with {names} given from Python"):
        simulate(file)
    assert main(["run", str(file)]) == 2
    with pytest.raises(UserError, match=r"^run.given: "):
        rerun(result.folder, ["run.output=elsewhere"])
    (line, again) = capsys.readouterr().err, {name: GIVEN[name]() for name in given}
    assert line.count("\n") == 1
    # with everything it is the same run
    assert simulate(file, **again).summary == result.summary
    other = simulate(file, overrides=["run.name=other", "engine.chunk=2"], **again)
    assert_same(result, other)
    longer = simulate(file, overrides=["run.rounds=4"], **again)
    assert (longer.summary["rounds"], longer.folder) == (4, result.folder)
    needed = {name: again[name] for name in given if name in ("data", "model", "loss", "metrics")}
    found = fedray.evaluate(other.folder, **needed)
    assert found.metrics["accuracy"] == other.summary["final_accuracy"]


def test_an_algorithm_of_a_notebook(tmp_path):
    result = run(tmp_path, ["data", "algorithm"], algorithm__mu=0.25)
    written = yaml.safe_load((result.folder / "config.yaml").read_text())
    assert written["algorithm"] == {"name": "Keep", "mu": 0.25}
    by_default = simulate({**settings(tmp_path, ["data"]), "run.name": None}, data=small_source(),
                          algorithm=in_a_notebook())  # fmt: skip
    assert by_default.folder.name == "Keep-small"
    assert by_default.summary["model_sha256"] != result.summary["model_sha256"]


def test_what_a_class_allows_travels_to_the_processes_of_a_sweep(monkeypatch):
    data = cloudpickle.dumps(CustomObjects(algorithm=in_a_notebook(), sampling=in_a_notebook(name="Even")()))
    # in another process there are no classes that could be found again
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    there = pickle.loads(data)
    assert allows(there.algorithm, "allows_aggregation")
    assert allows(type(there.sampling), "uniform")
    assert not allows(there.algorithm, "allows_private")


def test_changed_code_is_another_run(tmp_path):
    config = settings(tmp_path, ["data"])
    simulate(config, data=small_source(), algorithm=in_a_notebook())
    with pytest.raises(UserError, match=r"holds another run \(code of the algorithm differs\)"):
        simulate(config, data=small_source(), algorithm=in_a_notebook(factor=2.0))
    with pytest.raises(UserError, match=r"holds another run \(algorithm.mu, algorithm.name, code of the algorithm dif"):
        simulate({**config, "algorithm.name": "fedavg"}, data=small_source())


def test_an_algorithm_of_fedrays_is_only_named(tmp_path):
    config = settings(tmp_path, ["data"], algorithm__name="fedavg", algorithm__mu=0.3)
    result = simulate(config, data=small_source(), algorithm=FedProx)
    found = load(result.folder / "config.yaml")
    assert (found.algorithm.name, found.run.given) == ("fedprox", ["data"])


def test_keys_for_single_algorithms_count(tmp_path):
    own = {"algorithm.mu": 0.125}
    config = {**settings(tmp_path, ["data"]), "for_algorithm": {"Keep": own, "fedavg": {"train.lr": 0.01}}}
    result = simulate(config, data=small_source(), algorithm=in_a_notebook())
    found = load(result.folder / "config.yaml")
    assert (found.algorithm.model_extra, found.train.lr) == ({"mu": 0.125}, 0.1)
    with pytest.raises(UserError, match=r'^algorithm.name="Keep": the configuration was loaded for algorithm.name=pfe'):
        simulate(load(config), data=small_source(), algorithm=in_a_notebook())


def test_a_configuration_that_is_loaded_already(tmp_path):
    config = load(settings(tmp_path, ["data"], algorithm__name="fedavg"))
    asked = ["algorithm.mu=0.125", "run.rounds=1"]
    result = simulate(config, data=small_source(), algorithm=in_a_notebook(), overrides=asked)
    found = load(result.folder / "config.yaml")
    assert (found.algorithm.name, found.algorithm.model_extra, found.run.rounds) == ("Keep", {"mu": 0.125}, 1)


@pytest.mark.parametrize("algorithm", [FedProx(), Algorithm, nn.Linear, "fedprox", 3])
def test_what_is_no_class_of_an_algorithm(algorithm):
    for call in (simulate, fedray.tune):
        with pytest.raises(UserError, match=r"^algorithm= must be a subclass of fedray.algorithms.Algorithm, not "):
            call({}, algorithm=algorithm)
    with pytest.raises(UserError, match=r"^Keep: unknown key algorithm.beta"):
        simulate({"algorithm.beta": 0.5, "engine.kind": "local"}, algorithm=in_a_notebook())


@pytest.mark.slow
def test_on_ray_and_in_a_sweep(tmp_path, ray_cluster):
    given = ["data", "algorithm", *PARTS]
    local = run(tmp_path / "local", given)
    on_ray = run(tmp_path / "ray", given, engine__kind="ray", engine__actors=2, engine__vectorize=False)
    assert_same(local, on_ray)
    base = {key: value for key, value in settings(tmp_path, given).items() if not key.startswith(("run.", "engine"))}
    space = {"base": {**base, "run.rounds": 2}, "spaces": {"all": {"algorithm.mu": {"grid": [0.25, 0.5]}}}}
    asked = ["tune.sampler=grid", f"tune.output={tmp_path}", "tune.name=s", "tune.max_concurrent_trials=2"]
    objects = {name: GIVEN[name]() for name in given}
    (result,) = fedray.tune(space, asked, **objects)
    assert result.trials["state"].tolist() == ["complete"] * 2
    (best,) = result.best
    assert sorted(load(best).run.given) == sorted(given)
    with pytest.raises(UserError, match=r"holds another sweep \(code of the algorithm differs\)"):
        fedray.tune(space, asked, **{**objects, "algorithm": in_a_notebook(factor=2.0)})
