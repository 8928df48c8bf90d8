"""Private layers and personal models beside each other, robust rules, attacks and privacy: the same bits, or the same
numbers, as what is composed there."""

from __future__ import annotations

from collections.abc import Mapping
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
MOONS_HEAD = {"model__head": "moon", "model__proj_dim": 8}
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
    "fedtrip without its term is fedavg": (("fedtrip", {"mu": 0.0}), ("fedavg", {})),
    "moon without its term is fedavg": (("moon", {"mu": 0.0}), ("fedavg", {}), MOONS_HEAD),
}
ALIKE = {
    "fedmom is fedavgm with nesterov": (("fedmom", {"beta": 0.6}), ("fedavgm", {"beta": 0.6, "nesterov": True})),
    "slowmo is fedavgm": (("slowmo", {"beta": 0.6}), ("fedavgm", {"beta": 0.6})),
    "adabest without drift is fedmom": (("adabest", {"mu": 0.0, "beta": 0.6}), ("fedmom", {"beta": 0.6})),
    # theta goes eta_p down the gradient, and w goes eta_l lambda of the way to theta
    "pfedme is fedavg in one step": (
        ("pfedme", {"lam": 5.0, "inner_steps": 1, "personal_lr": 0.2}), ("fedavg", {}),
        {"train__local_epochs": None, "train__local_steps": 1, "train__lr": 0.1},
    ),
}  # fmt: skip
"""The same up to rounding, under what is beside them: the server's momentum takes whatever is in the mean's place."""


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("which", SAME)
def test_the_same_global_model(which, beside, tmp_path):
    one, other, *more = SAME[which]
    keys = {**BESIDE[beside], **(more[0] if more else {})}
    assert sha(tmp_path / "one", *one, **keys) == sha(tmp_path / "other", *other, **keys)


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("which", ALIKE)
def test_the_same_global_model_up_to_rounding(which, beside, tmp_path):
    one, other, *more = ALIKE[which]
    keys = {"train__weighting": "uniform", "run__rounds": 4, **BESIDE[beside], **(more[0] if more else {})}
    found, expected = (parameters(made_by(tmp_path / each[0], *each, **keys)) for each in (one, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


MEANS = {
    "none": {}, "a bound that nothing exceeds": {"train__aggregation": {"kind": "norm_bound", "norm": 1e6}},
    "privacy without noise": {
        "privacy__noise": 0.0, "privacy__clip": 1e6, "privacy__adaptive": False, "privacy__participation": "fixed",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hyper", "more"),
    [
        ("fedtrip", {}, {}), ("moon", {"mu": 2.0}, MOONS_HEAD), ("fedmom", {}, {}), ("slowmo", {}, {}),
        ("slowmo", {"buffer": "maintain"}, {"train__momentum": 0.5}), ("pfedme", {"beta": 0.5}, {}),
        ("adabest", {}, {}), ("fedhbm", {}, {}), ("local_ghbm", {}, {}), ("ghbm", {"tau": 2}, {}),
    ],
)  # fmt: skip
def test_what_changes_no_mean_changes_no_model(name, hyper, more, tmp_path):
    """With everything that the algorithm's clients keep, over rounds in which some of them come again."""
    found = [
        parameters(made_by(tmp_path / beside, name, hyper, train__weighting="uniform", run__rounds=4, **more, **keys))
        for beside, keys in MEANS.items()
    ]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-5)


PRIVATE = {"model__private": ["head"]}


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedavgm", {"beta": 0.0}), ("fedsam", {"rho": 0.0}), ("fednova", {}), ("fedprox", {"mu": 0.0}),
        ("fedbabu", {"frozen": []}), ("ditto", {}), ("apfl", {}), ("fedtrip", {"mu": 0.0}), ("fedmom", {"beta": 0.0}),
        ("slowmo", {"beta": 0.0}),
    ],
)  # fmt: skip
def test_rules_that_are_fedavg_are_fedper_with_private_layers(name, hyper, tmp_path):
    """FedNova with equally many steps. It and FedAvgM, FedMom and SlowMo compute the mean in another order."""
    keys = {"train__local_epochs": None, "train__local_steps": 4}
    made = composed(tmp_path / name, name, hyper, **keys, **PRIVATE)
    fedper = run(tmp_path / "fedper", algorithm="fedper", **keys)
    if name not in ("fedavgm", "fednova", "fedmom", "slowmo"):
        assert made.summary["model_sha256"] == fedper.summary["model_sha256"]
    for one, other in zip(made.model().parameters(), fedper.model().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    if name not in ("ditto", "apfl"):
        assert made.metrics.personalized_accuracy.tolist() == fedper.metrics.personalized_accuracy.tolist()


@pytest.mark.parametrize("which", ["fedmom is fedavgm with nesterov", "slowmo is fedavgm"])
def test_the_servers_momentum_is_that_of_the_shared_layers(which, tmp_path):
    made = [composed(tmp_path / each[0], *each, **PRIVATE) for each in ALIKE[which]]
    torch.testing.assert_close(*map(parameters, made), rtol=1e-4, atol=1e-5)
    one, other = map(personal_models, made)
    for client in one:
        torch.testing.assert_close(one[client], other[client], rtol=1e-4, atol=1e-5)
    kept = [[*each.model().parameters()][-1] for each in (made[0], run(tmp_path / "fedper", algorithm="fedper"))]
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("name", "hyper", "more"),
    [
        ("fedtrip", {"first": "initial"}, {}), ("moon", {"mu": 2.0}, MOONS_HEAD), ("pfedme", {}, {}),
        ("fedmom", {"beta": 0.0}, {}), ("slowmo", {"beta": 0.0}, {}),
        ("slowmo", {"beta": 0.0, "buffer": "maintain"}, {"train__momentum": 0.5}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layers", ["head", "*"])
def test_a_client_alone_keeps_its_layers_or_gets_them_back(name, hyper, more, layers, tmp_path):
    """What it keeps besides, such as its last model, has the private layers, too."""
    alone = {"data__clients": 1, "train__cohort_size": 1, "run__rounds": 4, **more}
    private = composed(tmp_path / "private", name, hyper, **alone, model__private=[layers])
    (own,) = personal_models(private).values()
    if name == "pfedme":
        (expected,) = personal_models(composed(tmp_path / "shared", name, hyper, **alone)).values()
    else:
        expected = by_name(dict(made_by(tmp_path / "shared", name, hyper, **alone).model().named_parameters()))
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_fedtrips_last_model_is_where_it_begins_if_everything_is_private(tmp_path):
    """The term mu ((y - x) + xi (w - y)) is then FedProx's with mu (1 - xi)."""
    keys = {"model__private": ["*"]}
    trip = {"mu": 0.4, "xi_mode": "const", "xi_const": 0.25, "first": "initial"}
    one, other = (
        personal_models(composed(tmp_path / name, name, hyper, **keys))
        for name, hyper in (("fedtrip", trip), ("fedprox", {"mu": 0.3}))
    )
    for client in one:
        torch.testing.assert_close(one[client], other[client], rtol=1e-4, atol=1e-5)


def test_moons_last_model_is_its_global_one_if_everything_is_private(tmp_path):
    """Both ends of the contrast are one model, whose pull is none."""
    keys = {"model__private": ["*"], **MOONS_HEAD}
    one, other = (
        personal_models(composed(tmp_path / name, name, hyper, **keys))
        for name, hyper in (("moon", {"mu": 5.0}), ("fedavg", {}))
    )
    for client in one:
        torch.testing.assert_close(one[client], other[client], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", [PRIVATE, BESIDE["poison"], BESIDE["privacy"]])
def test_hyper_parameters_may_take_a_permission_back(key, tmp_path):
    """SlowMo's server then averages buffers, too; by the size of a cohort updates tell who else takes part."""
    averaged = ("slowmo", {"buffer": "average"}, {"train__momentum": 0.5})
    by_size = ("fedhbm", {"scale": "participation"}, {}), ("local_ghbm", {"scale": "participation"}, {})
    for name, hyper, more in [averaged, *(() if key is PRIVATE else by_size)]:
        with pytest.raises(UserError, match=f"algorithm.name={name} does not say with these hyper-parameters that its"):
            made_by(tmp_path, name, hyper, **key, **more)


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


def made_by(folder: Path, name: str, hyper: dict[str, Any], **keys: Any) -> RunResult:
    return run(folder, algorithm=name, **{f"algorithm__{key}": value for key, value in hyper.items()}, **keys)


def composed(folder: Path, name: str, hyper: dict[str, Any], **keys: Any) -> RunResult:
    return made_by(folder, name, hyper, run__personal_models_of="all", **keys)


def sha(folder: Path, name: str, hyper: dict[str, Any], **keys: Any) -> str:
    found: str = made_by(folder, name, hyper, **keys).summary["model_sha256"]
    return found


def parameters(made: RunResult) -> torch.Tensor:
    """The parameters of the global model."""
    return torch.cat([each.detach().ravel() for each in made.model().parameters()])


def by_name(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].detach().ravel() for name in sorted(tensors)])


def personal_models(made: RunResult) -> dict[str, torch.Tensor]:
    """The parameters of the clients' personal models, by the names of their files."""
    files = {path.stem: load_file(path) for path in (made.folder / "personal").glob("*.safetensors")}
    assert files
    return {name: by_name(each) for name, each in files.items()}
