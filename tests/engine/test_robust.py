"""Gathered uploads, robust rules and attacks: each against numpy, the same bits anywhere, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from small_runs import Normed, run, small_images
from torch import nn

from fedray import UserError, simulate
from fedray.algorithms import Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.core.vectors import Layout, Model
from fedray.engine.sums import CohortSums
from fedray.engine.tasks import PartialSum, PhaseResult
from fedray.robust import RULES
from fedray.robust.rules.krum import best, distances
from fedray.testing.contracts import SETTINGS, assert_same, small_source

M, D = 11, 23
U = np.random.default_rng(4).normal(size=(M, D)) * np.linspace(0.3, 2, M)[:, None] + np.linspace(-1, 1, D)
P = np.linspace(1, 3, M) / np.linspace(1, 3, M).sum()


def made(kind, rows=U, weights=P, before=None, **options):
    tensors = [torch.tensor(each, dtype=torch.float32) for each in (rows, weights)]
    before = None if before is None else torch.tensor(before, dtype=torch.float32)
    return RULES[kind](**options)(tensors[0].clone(), tensors[1], before).double().numpy()


def krum_scores(rows, f):
    squares = ((rows[:, None] - rows[None]) ** 2).sum(axis=2)
    return np.array([np.sort(np.delete(row, i))[: max(1, len(rows) - f - 2)].sum() for i, row in enumerate(squares)])


def bulyan(rows, f):
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        # of nearest neighbours that are each other's the one that is nearer to the farthest
        squares = np.sort(((rows[left][:, None] - rows[left][None]) ** 2).sum(axis=2), axis=1)
        scores = krum_scores(rows[left], f).round(9)
        best = left[min(range(len(left)), key=lambda i: (scores[i], *squares[i][::-1]))]
        chosen.append(best)
        left.remove(best)
    rows = rows[chosen]
    keep = len(rows) - 2 * f
    median = np.median(rows, axis=0)
    return np.array(
        [sorted(column, key=lambda v, m=m: abs(v - m))[:keep] for column, m in zip(rows.T, median, strict=True)]
    ).mean(axis=1)


def clipped(rows, length):
    return rows * np.minimum(1, length / np.linalg.norm(rows, axis=1, keepdims=True))


def centered(rows, tau, passes, v):
    for _ in range(passes):
        v = v + clipped(rows - v, tau).mean(axis=0)
    return v


BEFORE = np.linspace(1, 2, D)
EXPECTED = [
    ("mean", {}, P @ U),
    ("median", {}, np.median(U, axis=0)),
    ("trimmed_mean", {"b": 3}, np.sort(U, axis=0)[3:-3].mean(axis=0)),
    ("trimmed_mean", {"b": 0}, U.mean(axis=0)),
    ("krum", {"f": 3}, U[krum_scores(U, 3).argmin()]),
    ("krum", {"f": 0}, U[krum_scores(U, 0).argmin()]),
    ("multi_krum", {"f": 3}, U[np.argsort(krum_scores(U, 3))[:8]].mean(axis=0)),
    ("multi_krum", {"f": 0}, U.mean(axis=0)),
    ("bulyan", {"f": 2}, bulyan(U, 2)),
    ("bulyan", {"f": 0}, U.mean(axis=0)),
    ("norm_bound", {"norm": 3.0}, P @ clipped(U, 3.0)),
    ("norm_bound", {"norm": 1e9}, P @ U),
    ("centered_clip", {"tau": 2.0}, centered(U, 2.0, 1, np.zeros(D))),
    ("centered_clip", {"tau": 1e9}, U.mean(axis=0)),
    ("geometric_median", {"nu": 1e9}, P @ U),
]


@pytest.mark.parametrize(("kind", "options", "expected"), EXPECTED, ids=lambda v: v if isinstance(v, str) else None)
def test_rules(kind, options, expected):
    np.testing.assert_allclose(made(kind, **options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("odd", [np.inf, np.nan, 3.3e38])
@pytest.mark.parametrize(
    ("kind", "options"), [("geometric_median", {}), ("norm_bound", {"norm": 3.0}), ("centered_clip", {"tau": 2.0})]
)
def test_a_client_that_sends_no_finite_numbers_has_no_say(kind, options, odd):
    rows, others = U.copy(), np.delete(U, 4, axis=0)
    rows[4, ::2] = odd
    found = made(kind, rows, **options)
    if not np.isfinite(odd):
        zeroed = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0)
        of_others = {"rows": others, "weights": np.delete(P, 4) / np.delete(P, 4).sum()}
        expected = made(kind, **options, **(of_others if kind == "geometric_median" else {"rows": zeroed}))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(found).all()


def test_running_statistics_are_averaged_whatever_is_clipped(tmp_path):
    """centered_clip goes on from what it gave before, which would lead variances below zero in later rounds."""
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedavg", "run.output": str(tmp_path), "run.rounds": 2}
    keys |= {"train.aggregation": {"kind": "centered_clip", "tau": 1e-9}}
    still = dict(simulate(keys, data=small_source(), model=Normed).model().state_dict())
    plain = keys | {"train.lr": 1e-12, "train.aggregation": {"kind": "mean"}}
    expected = dict(simulate(plain | {"run.name": "plain"}, data=small_source(), model=Normed).model().state_dict())
    # the same, as far as statistics go, where the clients hardly train the layer before
    alike = {**keys, "train.lr": 1e-12, "run.name": "alike"}
    found = dict(simulate(alike, data=small_source(), model=Normed).model().state_dict())
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(still[name], dict(Normed().state_dict())[name])
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert (still["norm.running_var"] > 0).all()
    torch.testing.assert_close(still["last.weight"], expected["last.weight"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(("m", "f"), [(11, 0), (11, 2), (11, 4), (5, 1), (3, 0), (4, 2)])
def test_order_of_krum(m, f):
    """How many neighbours count decides the order, and at least one does."""
    for rows in np.random.default_rng(m).standard_cauchy((50, m, 3)):
        scores = krum_scores(rows, f)
        found = scores[best(distances(torch.tensor(rows)), f)]
        np.testing.assert_allclose(found, np.sort(scores), rtol=1e-9)


@pytest.mark.parametrize(("kind", "least"), [("krum", 2 * 4 + 3), ("multi_krum", 2 * 4 + 3), ("bulyan", 4 * 4 + 3)])
def test_how_many_clients_a_rule_needs(kind, least):
    assert RULES[kind](f=4).least() == least


def test_median_of_an_even_number():
    np.testing.assert_allclose(made("median", U[:10], P[:10]), np.median(U[:10], axis=0), rtol=1e-5, atol=1e-6)


def test_centered_clip_goes_on_from_the_round_before():
    expected = centered(U, 2.0, 3, BEFORE)
    np.testing.assert_allclose(made("centered_clip", before=BEFORE, tau=2.0, passes=3), expected, rtol=1e-5)


def test_geometric_median():
    best = optimize.minimize(lambda z: P @ np.linalg.norm(U - z, axis=1), U.mean(axis=0), tol=1e-12).x
    np.testing.assert_allclose(made("geometric_median", passes=300), best, atol=1e-4)
    z = P @ U
    for _ in range(2):
        w = P / np.linalg.norm(U - z, axis=1)
        z = w @ U / w.sum()
    np.testing.assert_allclose(made("geometric_median", passes=2), z, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "options", "_"), EXPECTED, ids=lambda v: v if isinstance(v, str) else None)
def test_the_order_of_clients_does_not_matter(kind, options, _):
    order = np.random.default_rng(1).permutation(M)
    np.testing.assert_allclose(made(kind, U[order], P[order], **options), made(kind, **options), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("median", {}), ("trimmed_mean", {"b": 3}), ("krum", {"f": 3}), ("multi_krum", {"f": 3}), ("bulyan", {"f": 2}),
        ("geometric_median", {}), ("centered_clip", {"tau": 2.0}), ("norm_bound", {"norm": 3.0}),
    ],
)  # fmt: skip
def test_two_far_away_hardly_move_it(kind, options):
    rows = U.copy()
    rows[[2, 7]] = 1e4
    others = np.delete(U, [2, 7], axis=0)
    assert np.linalg.norm(made(kind, rows, **options) - others.mean(axis=0)) < 2 * np.linalg.norm(others.std(axis=0))


TOGETHER: list[dict[str, Any]] = [
    {"rule": {"kind": "krum", "f": 1}, "attack": {"kind": "alie"}},
    {"rule": {"kind": "centered_clip", "tau": 1.0}, "attack": {"kind": "noise"}},
    {"rule": {"kind": "median"}, "attack": {"kind": "label_flip"}},
    {"rule": {"kind": "trimmed_mean", "b": 1}, "attack": {"kind": "sign_flip"}},
    {"rule": {"kind": "bulyan", "f": 1}, "attack": {"kind": "ipm"}},
    {"rule": {"kind": "geometric_median"}, "attack": {"kind": "backdoor", "patch": 2}},
    {"rule": {"kind": "norm_bound", "norm": 0.5}, "attack": {"kind": "backdoor", "patch": 2, "scale": 3.0}},
]
"""Every rule and every attack, in as few runs as possible."""


def together(folder, rule, attack, **keys):
    keys = {"train__aggregation": rule, "attack": {"fraction": 0.3, **attack}, "train__cohort_size": 7, **keys}
    return run(folder, data=small_images() if attack["kind"] == "backdoor" else None, **keys)


@pytest.mark.parametrize("case", TOGETHER[:2], ids=["krum", "centered_clip"])
def test_the_same_bits_anywhere_and_when_it_is_resumed(case, tmp_path):
    keys = case | {"run__checkpoint_every": 1}
    whole = together(tmp_path / "whole", **keys)
    together(tmp_path / "parts", **keys, run__rounds=3)
    assert_same(whole, together(tmp_path / "parts", **keys))
    pool = {"engine__chunk": 1, "engine__kind": "fedray.testing.pickling:PicklingPool"}
    assert_same(whole, together(tmp_path / "chunks", **keys, **pool))
    assert whole.summary["model_sha256"] != run(tmp_path / "plain", train__cohort_size=7).summary["model_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: "-".join(each["kind"] for each in case.values()))
def test_on_ray(case, tmp_path, ray_cluster):
    local = together(tmp_path / "local", **case)
    ray = {"engine__kind": "ray", "engine__actors": 3, "engine__cpus_per_actor": 0.3}
    assert_same(local, together(tmp_path / "ray", **case, **ray))


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "multi_krum", "f": 0}, {"kind": "bulyan", "f": 0}, {"kind": "trimmed_mean", "b": 0},
        {"kind": "norm_bound", "norm": 1e9}, {"kind": "centered_clip", "tau": 1e9},
        {"kind": "geometric_median", "nu": 1e9},
    ],
    ids=lambda keys: keys["kind"],
)  # fmt: skip
def test_what_is_the_mean_is_fedavg(keys, tmp_path):
    plain = run(tmp_path / "plain", train__weighting="uniform")
    robust = run(tmp_path / "robust", train__weighting="uniform", train__aggregation=keys)
    assert robust.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-4)


def test_running_statistics_and_counts(tmp_path):
    keys = {"train__weighting": "uniform", "call": {"model": Normed()}, "model__name": None, "model__hidden": None}
    plain = run(tmp_path / "plain", **keys)
    robust = run(tmp_path / "robust", train__aggregation={"kind": "multi_krum", "f": 0}, **keys)
    assert robust.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-4)
    ours, theirs = robust.model().state_dict(), plain.model().state_dict()
    assert ours["norm.num_batches_tracked"] == theirs["norm.num_batches_tracked"] > 0


def test_a_rule_withstands_what_the_mean_does_not(tmp_path):
    keys = {"attack__kind": "sign_flip", "attack__fraction": 0.2, "attack__scale": 20.0, "run__rounds": 12}
    harmed = run(tmp_path / "harmed", **keys)
    defended = run(tmp_path / "defended", train__aggregation={"kind": "median"}, **keys)
    assert defended.metrics.test_loss.iloc[-1] < 0.7 * harmed.metrics.test_loss.iloc[-1]


class Gathering(FedAvg):
    """FedAvg whose server takes the mean itself."""

    allows_aggregation = True

    def end(self, client, carry):
        return Result({"y": Upload.gather(carry["y"]), "n": Upload.gather(client.n)})

    def server_update(self, server, phase, sums, scalars):
        # an attacker lies about everything that it sends
        assert [abs(int(n)) for n in sums["n"][:, 0]] == list(server.cohort.sizes)
        p = torch.tensor(server.cohort.weights)[:, None]
        rows = sums["y"].row.double() * p
        server.move(Model(rows.sum(dim=0).float(), sums["y"].width))


def test_an_algorithm_may_gather(tmp_path):
    plain = run(tmp_path / "plain")
    own = run(tmp_path / "own", algorithm=f"{__file__}:Gathering")
    assert own.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-5)
    assert_same(own, run(tmp_path / "chunks", algorithm=f"{__file__}:Gathering", engine__chunk=1))


@pytest.mark.parametrize("gathered", [False, True])
def test_results_whose_values_come_with_another_result(gathered):
    """As from another node, which sends the values of all its tasks together, with the last result."""
    layout = Layout(nn.Linear(3, 2))
    sums = CohortSums(FedAvg(), "train", 4, layout, torch.device("cpu"))
    rows = [torch.full((5,), float(2**place), dtype=torch.float32 if gathered else torch.float64) for place in range(4)]
    nodes = {(0, place): row.numpy() for place, row in enumerate(rows)}
    for place in range(4):
        found = PartialSum(nodes if place == 3 else {}, "sum", False, None, gathered)
        task = SimpleNamespace(positions=[place])
        sums.add(task, PhaseResult({"n": found}, {}, {}))
    total = sums.totals()["n"]
    assert total.tolist() == (torch.stack(rows).tolist() if gathered else [15.0] * 5)
    assert sums.gathered == ({"n": "sum"} if gathered else {})


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedadam"])
def test_what_is_left_of_a_cohort_may_be_too_few(algorithm, tmp_path):
    """With drop-out a round of fewer clients than the rule needs leaves the model as it is, and says so. A server's
    momentum does not move it either."""
    keys = {"train__aggregation": {"kind": "krum", "f": 1}, "system__dropout": 0.5, "run__rounds": 8}
    keys["algorithm"] = algorithm
    made = run(tmp_path, train__cohort_size=5, **keys)
    few = made.metrics[made.metrics.cohort_size < 5]["round"].tolist()
    log = (made.folder / "log.txt").read_text()
    assert few
    assert all(f"round {number}: " in log and "the server's model stays as it is" in log for number in few)
    losses = [None, *made.metrics.test_loss]
    assert [losses[r] == losses[r - 1] for r in range(2, 9)] == [r in few for r in range(2, 9)]


def test_whoever_was_not_used_counts_as_new_for_oort(tmp_path):
    keys = {"train__aggregation": {"kind": "krum", "f": 1}, "system__dropout": 0.6, "run__rounds": 8}
    made = run(tmp_path, train__cohort_size=6, train__sampling="oort", **keys)
    assert (made.metrics.cohort_size < 6).any()
    assert made.summary["status"] == "completed"


@pytest.mark.parametrize(
    "rule",
    [{"kind": kind, **options} for kind, options in [
        ("median", {}), ("trimmed_mean", {"b": 1}), ("krum", {"f": 1}), ("multi_krum", {"f": 1}), ("bulyan", {"f": 0}),
        ("geometric_median", {}), ("centered_clip", {"tau": 1.0}), ("norm_bound", {"norm": 1.0}),
    ]],
    ids=lambda rule: rule["kind"],
)  # fmt: skip
def test_statistics_count_in_no_length_and_are_averaged_by_weight(rule, tmp_path):
    """The inputs are far from 0, so that lengths would be those of running means and variances."""
    source = small_source()
    far = replace(source, x_train=10 * source.x_train + 20, x_test=10 * source.x_test + 20)
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedavg", "run.output": str(tmp_path), "train.lr": 1e-12, "run.rounds": 2}

    def statistics(name, **more):
        model = lambda: nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 4))  # noqa: E731
        made = simulate(keys | {"run.name": name} | more, data=far, model=model)
        return {name: each for name, each in made.model().state_dict().items() if "running" in name}

    plain, found = statistics("plain"), statistics("robust", **{"train.aggregation": rule})
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)


def test_clients_of_such_a_round_keep_what_they_had(tmp_path):
    """Nothing of what they sent was used, so a step must not count it as sent."""
    keys = {"train__aggregation": {"kind": "trimmed_mean", "b": 4}, "system__dropout": 0.6, "run__rounds": 3}
    made = run(tmp_path, train__cohort_size=9, train__upload=[{"topk": 0.1}], run__checkpoint_every=1, **keys)
    assert (made.metrics.cohort_size < 9).all()
    assert not [*(made.folder / "checkpoints").rglob("client-*")]


def test_an_attack_on_gathered_uploads(tmp_path):
    own = f"{__file__}:Gathering"
    plain = run(tmp_path / "plain", algorithm=own)
    attacked = run(tmp_path / "attacked", algorithm=own, attack__kind="sign_flip", attack__fraction=0.3)
    assert attacked.summary["model_sha256"] != plain.summary["model_sha256"]
    mean = run(tmp_path / "mean", attack__kind="sign_flip", attack__fraction=0.3)
    assert attacked.metrics.test_loss.tolist() == pytest.approx(mean.metrics.test_loss.tolist(), rel=1e-4)


def test_private_layers_are_no_part_of_it(tmp_path):
    keys = {"train__weighting": "uniform", "model__private": ["head"]}
    plain = run(tmp_path / "plain", **keys)
    robust = run(tmp_path / "robust", train__aggregation={"kind": "norm_bound", "norm": 1e9}, **keys)
    assert robust.metrics.personalized_accuracy.tolist() == plain.metrics.personalized_accuracy.tolist()
    noise = {"attack__kind": "noise", "attack__fraction": 0.2}
    assert run(tmp_path / "noise", **keys, **noise).summary["status"] == "completed"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__aggregation": {"kind": "krum"}}, "kind=krum needs f"),
        (
            {"train__aggregation": {"kind": "median", "f": 2}},
            "f is not for kind=median, but for krum and multi_krum and bulyan",
        ),
        ({"train__aggregation": {"kind": "crum", "f": 2}}, "crum"),
        (
            {"train__aggregation": {"kind": "bulyan", "f": 2}, "train__cohort_size": 6},
            "needs cohorts of at least 11 clients, and there are 6",
        ),
        ({"attack__kind": "alie"}, "kind=alie needs fraction"),
        ({"attack__fraction": 0.2}, "attack.fraction needs attack.kind"),
        ({"attack__kind": "alie", "attack__fraction": 0.2, "attack__eps": 3}, "eps is not for kind=alie, but for ipm"),
        ({"algorithm": "scaffold", "train__aggregation": {"kind": "median"}}, "algorithm.name=scaffold does not say"),
        ({"run__diagnostics": True, "train__aggregation": {"kind": "median"}}, "run.diagnostics compares"),
    ],
)
def test_what_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        run(tmp_path, **keys)
