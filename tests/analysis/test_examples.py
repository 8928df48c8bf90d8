"""The programs in analysis/examples, shortened: losses fall, and saved models have the metrics of their summaries."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedray import RunResult

FOLDER = Path(__file__).parents[2] / "analysis" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def data(name: str) -> Path:
    path = Path(os.environ.get("FEDRAY_DATA") or "/nowhere") / name
    if not path.exists():
        pytest.skip(f"$FEDRAY_DATA has no {name}")
    return path


def outputs(result: RunResult, x: Any) -> torch.Tensor:
    with torch.no_grad():
        return result.model()(torch.as_tensor(x))


def assert_learns(result: RunResult) -> None:
    losses = result.metrics["test_loss"].dropna()
    assert losses.iloc[-1] < 0.95 * losses.iloc[0]


PICTURES = {
    "segmentation": {"run.rounds": 1, "train.local_epochs": 1},
    "personal_layers": {"run.rounds": 2, "run.eval_every": 2},
    "private_training": {"run.rounds": 2, "run.eval_every": 1},
    "drift": {"run.rounds": 2},
    "stepping": {"run.rounds": 3},
    "attacks": {"run.rounds": 2},
    "slow_devices": {"run.rounds": 3},
    "prices": {"run.rounds": 2},
    "texts": {"run.rounds": 2},
    "clothes": {"run.rounds": 1, "train.local_steps": 2, "engine.kind": "local"},
}
"""The examples of the gallery that take settings, with what makes them short."""


@pytest.mark.parametrize("name", PICTURES)
def test_gallery(name, tmp_path):
    """Each runs, draws what it computed, and stands in the gallery with a picture of its whole run."""
    example(name).main(tmp_path, **PICTURES[name])
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "short"), [("own_algorithm", {"seeds": 1}), ("sweep", {"trials": 2})])
def test_gallery_on_ray(name, short, tmp_path):
    example(name).main(tmp_path, **short, **{"run.rounds": 2})
    assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_every_picture_of_the_gallery_has_its_example():
    shown = {path.stem for path in (FOLDER.parents[1] / "docs" / "gallery").glob("*.png")}
    assert shown == {
        *PICTURES,
        "own_algorithm",
        "sweep",
        "fedavg_pfedmo",
        "flower_fedbn",
        "pfllib_fedrep",
        "fedjax_mime",
    }


SHORT = {"engine.kind": "local", "run.checkpoint_every": 0}


def test_fedavg_pfedmo(tmp_path):
    """The README's first command, with short runs: it says in its last line where the page is."""
    short = ["run.rounds=1", "train.local_steps=1", "model.name=logistic"]
    program = [sys.executable, str(FOLDER / "fedavg_pfedmo.py"), *short]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    page = tmp_path / done.stdout.splitlines()[-1].removeprefix("open ")
    assert {"fedavg", "pfedmo"} <= set(page.read_text().replace("<", " ").replace(">", " ").split())


@pytest.mark.slow
def test_flower_fedbn(tmp_path, monkeypatch):
    """Its clients have images in the baseline's format too, and its network is that of the baseline."""
    module = example("flower_fedbn")
    assert sum(each.numel() for each in module.DigitModel((3, 28, 28), 10).parameters()) == 14_219_210
    clients = module.clients()
    module.write_for_flower(tmp_path / "data")
    for name, gray in (("MNIST", True), ("SVHN", False)):
        images, labels = np.load(tmp_path / "data" / name / "partitions" / "train_part7.pkl", allow_pickle=True)
        x, y = (each[: module.TRAIN] for each in clients[name])
        assert np.array_equal(images, x[..., 0] if gray else x)
        assert np.array_equal(labels, y)
    monkeypatch.setattr(module, "clients", lambda: {name: (x[-60:], y[-60:]) for name, (x, y) in clients.items()})
    monkeypatch.setattr(module, "TRAIN", 40)
    table = module.main(tmp_path, seeds=(0,), **{"run.rounds": 2})
    assert len(table) == 2 * 2 * 5
    first = table[table["round"] == 1].pivot_table("loss", "client", "algorithm")
    # before the first average there is no difference
    assert first["fedavg"].equals(first["fedbn"].rename("fedavg"))


def test_pfllib_fedrep(tmp_path, monkeypatch):
    """Its clients have images of two classes, in PFLlib's format too, and its network is PFLlib's."""
    module = example("pfllib_fedrep")
    assert sum(each.numel() for each in module.CNN((1, 28, 28), 10).parameters()) == 582_026
    clients = module.clients()
    assert all(len(np.unique(y)) == 2 and len(y) == 500 for _, y in clients)
    assert np.bincount(np.concatenate([y for _, y in clients])).tolist() == [1000] * 10
    module.write_for_pfllib(tmp_path / "data")
    for part, rows in {"train": slice(400), "test": slice(400, None)}.items():
        with np.load(tmp_path / "data" / part / "7.npz", allow_pickle=True) as file:
            found = file["data"].tolist()
        assert np.array_equal(found["x"], clients[7][0][rows])
        assert np.array_equal(found["y"], clients[7][1][rows])
    monkeypatch.setattr(module, "clients", lambda: [(x[-50:], y[-50:]) for x, y in clients[:4]])
    monkeypatch.setattr(module, "TRAIN", 40)
    table = module.main(tmp_path, seeds=(0,), **{"run.rounds": 2, "train.cohort_size": 4})
    assert table.groupby("algorithm")["accuracy"].count().tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["LSTM", "Transformer"])
def test_shakespeare(model, tmp_path):
    module, file = example("shakespeare"), data("tinyshakespeare/input.txt")
    short = {**SHORT, "run.rounds": 6, "run.eval_every": 2, "run.output": str(tmp_path)}
    result = module.main(file, getattr(module, model), **short)
    assert_learns(result)
    x, y, speaker = module.speeches(file)
    assert len(np.unique(speaker)) > 300
    test = np.arange(len(x)) % 10 == 9
    loss = F.cross_entropy(outputs(result, x[test]).transpose(1, 2), torch.from_numpy(y[test]))
    assert result.summary["metric"] == "perplexity"
    assert result.summary["final"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.slow
def test_har(tmp_path):
    module, folder = example("har"), data("UCI_HAR_Dataset")
    result = module.main(folder, **SHORT, **{"run.rounds": 6, "run.eval_every": 2, "run.output": str(tmp_path)})
    assert_learns(result)
    assert set(result.evaluation["client_name"]) == {str(person) for person in range(1, 31)}
    x, y, who = module.windows(folder)
    assert x.shape == (10299, 9, 128)
    test = module.of_tests(who)
    right = outputs(result, x[test]).argmax(1) == torch.from_numpy(y[test])
    assert result.summary["final_accuracy"] == pytest.approx(float(right.float().mean()))


def test_prices(tmp_path):
    module = example("prices")
    result = module.main(tmp_path, **SHORT, **{"run.rounds": 12})
    assert_learns(result)
    x, y, _ = module.houses(6000)
    within = module.within_a_tenth(outputs(result, x[5000:]), torch.from_numpy(y[5000:]).float())
    assert (result.summary["metric"], result.summary["mode"]) == ("within_a_tenth", "max")
    assert result.summary["final"] == pytest.approx(float(within.float().mean()))


@pytest.mark.slow
def test_clothes(tmp_path):
    module = example("clothes")
    result = module.main(tmp_path, **SHORT, **{"run.rounds": 6})
    assert_learns(result)
    images, labels = module.tests()
    found, real = outputs(result, images) > 0, torch.from_numpy(labels)
    assert result.summary["metric"] == "f1"
    assert result.summary["final"] == pytest.approx(float(2 * (found & real).sum() / (found.sum() + real.sum())))


@pytest.mark.slow
def test_tiny_imagenet(tmp_path):
    module, folder = example("tiny_imagenet"), data("tiny-imagenet-200")
    short = {
        **SHORT, "run.rounds": 3, "run.eval_every": 0, "data.clients": 40, "train.cohort_size": 4,
        "train.local_epochs": 1, "train.lr": 0.02, "data.partition.kind": "iid", "run.output": str(tmp_path),
    }  # fmt: skip
    result = module.main(folder, **short)
    assert result.metrics["train_loss"].iloc[-1] < result.metrics["train_loss"].iloc[0]
    test = module.TinyImageNet(folder, "val")
    x = torch.stack([image for image, _ in test])
    right = torch.cat([outputs(result, part / 255).argmax(1) for part in x.split(50)]) == torch.tensor(test.targets)
    assert result.summary["final_accuracy"] == pytest.approx(float(right.float().mean()), abs=0.002)


def test_fedjax_mime(tmp_path, monkeypatch):
    """Both kinds of batches run, and what FedJAX would be given has the clients, the cohorts and the initial model."""
    module = example("fedjax_mime")
    own, x_test, y_test = module.clients()
    assert [len(y) for _, y in own] == [60 + 20 * (client // 2) for client in range(20)]
    assert all(len(np.unique(y)) == 5 for _, y in own)
    few = [(x[:20], y[:20]) for x, y in own], x_test[:100], y_test[:100]
    monkeypatch.setattr(module, "clients", lambda: few)

    def instead(command, check):
        """FedJAX's side, with the models that it began with."""
        with np.load(command[2]) as given:
            parts = [given[name].ravel() for name in given.files if name.startswith("parameter ")]
            assert np.array_equal(given["cohorts"], module.cohorts(0)[:2])
            assert np.array_equal(given["x 3"], few[0][3][0])
        np.savez(command[3], accuracies=[0.1, 0.2], models=[np.concatenate(parts)] * 2)

    monkeypatch.setattr(module.subprocess, "run", instead)
    table = module.main(tmp_path, Path("python"), seeds=(0,), **{"run.rounds": 2})
    assert table.groupby(["batches", "system"])["accuracy"].count().tolist() == [2] * 4
    # models that stayed where they were are as far away as fedray's have gone
    assert table["apart"].dropna().round(6).tolist() == [1.0] * 4
