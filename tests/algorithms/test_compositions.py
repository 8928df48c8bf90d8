"""Private layers and personal models beside each other, robust rules, attacks and privacy: the same bits, or the same
numbers, as what is composed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Normed, run

from fedray import UserError
from fedray.algorithms import find_algorithm
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import assert_same
from fedray.tracking.result import RunResult

pytestmark = pytest.mark.filterwarnings("ignore::fedray.FedrayWarning")

BESIDE: dict[str, dict[str, Any]] = {
    "robust": {
        "train__aggregation": {"kind": "centered_clip", "tau": 1.0},
        "attack__kind": "sign_flip", "attack__fraction": 0.2,
    },
    "poison": {
        "train__aggregation": {"kind": "median"}, "attack__kind": "label_flip", "attack__fraction": 0.2,
    },
    "privacy": {"privacy__noise": 0.4, "privacy__clip": 0.5, "privacy__adaptive": True},
}  # fmt: skip
NORMED = {"call": {"model": Normed()}, "model__name": None, "model__hidden": None}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(
    ("name", "layers", "keys"),
    [("fedper", "head", {}), ("lg_fedavg", "base", {}), ("fedbn", "norm", NORMED)],
)
def test_algorithms_with_private_layers_are_fedavg_with_the_key(name, layers, keys, beside, tmp_path):
    own = run(tmp_path / "own", algorithm=name, **keys, **BESIDE[beside])
    assert_same(own, run(tmp_path / "key", model__private=[layers], **keys, **BESIDE[beside]))
    alone = run(tmp_path / "alone", algorithm=name, **keys)
    assert alone.summary["model_sha256"] != own.summary["model_sha256"]


SAME = {
    "fedrep without steps of the head is fedbabu": (("fedrep", {"head_steps": 0}), ("fedbabu", {})),
    "warm-up alone is fedavg": (("lg_fedavg", {"warmup_rounds": 99}), ("fedavg", {})),
    "ditto's global model is fedavg's": (("ditto", {}), ("fedavg", {})),
    "apfl's global model is fedavg's": (("apfl", {}), ("fedavg", {})),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("which", SAME)
def test_the_same_global_model(which, beside, tmp_path):
    one, other = SAME[which]
    assert sha(tmp_path / "one", *one, **BESIDE[beside]) == sha(tmp_path / "other", *other, **BESIDE[beside])


PRIVATE = {"model__private": ["head"]}


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedavgm", {"beta": 0.0}), ("fedsam", {"rho": 0.0}), ("fednova", {}), ("fedprox", {"mu": 0.0}),
        ("fedbabu", {"frozen": []}), ("ditto", {}), ("apfl", {}),
    ],
)  # fmt: skip
def test_rules_that_are_fedavg_are_fedper_with_private_layers(name, hyper, tmp_path):
    """FedNova with equally many steps. It and FedAvgM compute the mean in another order."""
    keys = {"train__local_epochs": None, "train__local_steps": 4}
    made = composed(tmp_path / name, name, hyper, **keys, **PRIVATE)
    fedper = run(tmp_path / "fedper", algorithm="fedper", **keys)
    if name not in ("fedavgm", "fednova"):
        assert made.summary["model_sha256"] == fedper.summary["model_sha256"]
    for one, other in zip(made.model().parameters(), fedper.model().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    if name not in ("ditto", "apfl"):
        assert made.metrics.personalized_accuracy.tolist() == fedper.metrics.personalized_accuracy.tolist()


def test_a_mixture_of_the_global_model_alone_is_fedpers_model(tmp_path):
    """APFL's share of the own model is 0."""
    hyper = {"alpha": 0.0, "adaptive": False}
    own, fedper = (
        personal_models(composed(tmp_path / name, name, hyper if name == "apfl" else {}, **keys))
        for name, keys in (("apfl", PRIVATE), ("fedper", {}))
    )
    assert all(torch.equal(own[client], fedper[client]) for client in fedper)


def test_dittos_own_model_goes_its_own_way_without_a_pull(tmp_path):
    """Whatever is private; with a pull it is drawn to the global model with the client's own layers."""
    found = {}
    for lam in (0.0, 0.5):
        plain, private = (
            personal_models(composed(tmp_path / f"{lam}-{len(keys)}", "ditto", {"lam": lam}, **keys))
            for keys in ({}, PRIVATE)
        )
        found[lam] = all(torch.equal(plain[client], private[client]) for client in plain)
    assert found == {0.0: True, 0.5: False}


@pytest.mark.parametrize("beside", [{}, PRIVATE, *BESIDE.values()], ids=["alone", "private", *BESIDE])
def test_perfedavg_without_a_first_step_takes_every_second_mini_batch(beside, tmp_path, monkeypatch):
    keys = {"train__local_epochs": None, "train__local_steps": 6, **beside}
    meta = sha(tmp_path / "meta", "perfedavg", {"alpha": 0.0}, **keys)

    def every_second(self, client, carry, batch):
        return FedAvg.step(self, client, carry, batch) if batch.step % 2 else carry

    monkeypatch.setattr(find_algorithm("perfedavg"), "step", every_second)
    assert sha(tmp_path / "plain", "perfedavg", {"alpha": 0.0}, **keys) == meta


def test_statistics_that_leave_in_warm_up_rounds_are_refused(tmp_path):
    """LG-FedAvg keeps its base, with the norms in it, but for these rounds."""
    private = {"privacy__noise": 0.8, "privacy__clip": 0.5, **NORMED}
    assert composed(tmp_path / "none", "lg_fedavg", {}, **private).summary["status"] == "completed"
    with pytest.raises(UserError, match="running statistics of norm would leave clients without noise"):
        composed(tmp_path / "some", "lg_fedavg", {"warmup_rounds": 1}, **private)


def composed(folder: Path, name: str, hyper: dict[str, Any], **keys: Any) -> RunResult:
    own = {f"algorithm__{key}": value for key, value in hyper.items()}
    return run(folder, algorithm=name, run__personal_models_of="all", **own, **keys)


def sha(folder: Path, name: str, hyper: dict[str, Any], **keys: Any) -> str:
    own = {f"algorithm__{key}": value for key, value in hyper.items()}
    found: str = run(folder, algorithm=name, **own, **keys).summary["model_sha256"]
    return found


def personal_models(made: RunResult) -> dict[str, torch.Tensor]:
    """The parameters of the clients' personal models, by the names of their files."""
    files = {path.stem: load_file(path) for path in (made.folder / "personal").glob("*.safetensors")}
    assert files
    return {name: torch.cat([each[key].ravel() for key in sorted(each)]) for name, each in files.items()}
