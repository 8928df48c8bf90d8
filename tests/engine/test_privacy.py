"""Differential privacy: the mechanism against numpy, the accountant against the library, the same bits anywhere, and
what would break the promise."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from small_runs import Normed, run

from fedray import FedrayWarning, Simulation, UserError
from fedray.algorithms import Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.config import load
from fedray.experiment.cohorts import draw_independently
from fedray.privacy import Accountant, Mechanism
from fedray.privacy.accountant import noise_for
from fedray.testing.contracts import SETTINGS, assert_same, small_source

pytestmark = pytest.mark.filterwarnings("ignore::fedray.FedrayWarning")

SILENT = {"privacy__noise": 0.0, "privacy__participation": "fixed"}


def library_epsilon(z, rate, delta, rounds, kind="pld"):
    event = dp_accounting.GaussianDpEvent(z)
    event = dp_accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event
    accountant = pld.PLDAccountant() if kind == "pld" else rdp.RdpAccountant()
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds)).get_epsilon(delta)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("z", "rate", "rounds"), [(1.0, 0.01, 500), (0.7, 0.001, 1000), (6.12, 0.01, 100), (5.0, 1.0, 20), (1.0, 0.001, 10)]
)
def test_epsilon_is_that_of_the_library(z, rate, rounds, kind):
    expected = library_epsilon(z, rate, 1e-5, rounds, kind)
    assert Accountant(z, rate, 1e-5, kind).epsilon(rounds) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_before_the_first_round_nothing_is_spent(kind, tmp_path):
    assert Accountant(1.0, 0.1, 1e-5, kind).epsilon(0) == 0
    keys = {"algorithm.name": "fedavg", "run.output": str(tmp_path)}
    keys |= {"privacy.noise": 1.0, "privacy.clip": 1.0, "privacy.accountant": kind}
    with Simulation({**SETTINGS, **keys}, data=small_source()) as simulation:
        # reading the model opens the run
        simulation.model()
    assert simulation.result.summary["epsilon"] == 0


def test_epsilon_of_one_gaussian_is_known():
    """Of a single sum without sampling delta(epsilon) is a formula: Balle and Wang, ICML 2018, Theorem 8."""
    z, delta = 2.0, 1e-4
    epsilon = Accountant(z, 1.0, delta, "pld").epsilon(1)

    def phi(v):
        return (1 + math.erf(v / math.sqrt(2))) / 2

    found = phi(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * phi(-1 / (2 * z) - epsilon * z)
    assert found == pytest.approx(delta, rel=0.01)


def test_noise_for_epsilon():
    for epsilon, rate, rounds, kind in ((2.0, 0.01, 100, "pld"), (1.0, 1.0, 10, "pld"), (8.0, 1.0, 10, "rdp")):
        z = noise_for(epsilon, rate, 1e-5, kind, rounds)
        assert float(f"{z:.4g}") == z
        assert Accountant(z, rate, 1e-5, kind).epsilon(rounds) <= epsilon
        assert Accountant(0.998 * z, rate, 1e-5, kind).epsilon(rounds) > epsilon
    assert Accountant(0.0, 0.1, 1e-5, "pld").epsilon(3) == math.inf


def mechanism(**changes):
    return Mechanism(**{"noise": 1.5, "clip": 2.0, "adaptive": False, "cohort": 40, "counted": 40, "seed": 3} | changes)


def test_clipping():
    rows = np.random.default_rng(1).normal(size=(6, 50)) * np.linspace(0.05, 1, 6)[:, None]
    found, within = mechanism().clipped(torch.tensor(rows, dtype=torch.float32), torch.tensor([2.0]))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(found, rows * np.minimum(1, 2 / lengths), rtol=1e-6)
    assert within.tolist() == [[float(each)] for each in (lengths <= 2)[:, 0]]
    assert 0 < within.sum() < 6


def test_what_is_not_finite_counts_as_nothing():
    rows = torch.tensor([[1.0, 2.0, math.inf], [0.5, math.nan, 0.0], [0.3, 0.4, 0.0]])
    found, within = mechanism().clipped(rows, torch.tensor([2.0]))
    assert found.tolist() == [[0, 0, 0], [0, 0, 0], pytest.approx([0.3, 0.4, 0.0])]
    assert within.tolist() == [[0], [0], [1]]


def test_noise_of_the_mean():
    total = torch.linspace(-1, 1, 20000)
    for made, deviation in ((mechanism(), 1.5 * 2 / 40), (mechanism(counted=1000), 1.5 * 2 / 1000)):
        noise = (made.mean(total, 2.0, 7).double() - total.double() / 40).numpy()
        assert kstest(noise / deviation, "norm").pvalue > 0.001
        assert (made.mean(total, 2.0, 7) == made.mean(total, 2.0, 7)).all()
        other = (made.mean(total, 2.0, 8).double() - total.double() / 40).numpy()
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.03


@given(z=st.floats(0.3, 3.9))
def test_noise_is_divided_between_updates_and_their_lengths(z):
    made = mechanism(noise=z, adaptive=True)
    sigma_b = 40 / 20
    assert made.of_updates == pytest.approx((z**-2 - (2 * sigma_b) ** -2) ** -0.5)
    # together they are one Gaussian mechanism of z (Andrew et al., Theorem 1)
    assert made.of_updates**-2 + (2 * sigma_b) ** -2 == pytest.approx(z**-2)
    assert mechanism(noise=z, adaptive=True, counted=made.least_cohort).of_updates > z


def test_the_length_follows_the_median():
    made = mechanism(adaptive=True, noise=0.0)
    # 30 of 40 are shorter: b = 3/4, and S <- S exp(-0.2 (3/4 - 1/2))
    assert made.next_clip(2.0, 30, 40, 5) == pytest.approx(2 * math.exp(-0.2 * 0.25))
    # only 20 have come, all of them shorter, and the constant 40 divides
    assert made.next_clip(2.0, 20, 20, 5) == pytest.approx(2 * math.exp(-0.2 * (10 / 40)))
    assert mechanism().next_clip(2.0, 30, 40, 5) == 2.0
    noisy = [math.log(mechanism(adaptive=True, seed=s).next_clip(1.0, 20, 40, 5)) / -0.2 for s in range(400)]
    assert kstest(np.array(noisy) * 20, "norm").pvalue > 0.001


def test_the_two_noises_of_a_round_are_two(monkeypatch):
    drawn, generator = [], Mechanism._generator
    monkeypatch.setattr(Mechanism, "_generator", lambda *given: drawn.append(given[1:]) or generator(*given))
    made = mechanism(adaptive=True)
    for number in (1, 2):
        made.mean(torch.zeros(3), 2.0, number)
        made.next_clip(2.0, 20, 40, number)
    assert len({generator(made, *each).initial_seed() for each in drawn}) == len(drawn) == 4


def test_independent_participation():
    present = np.arange(50) * 3
    drawn = [draw_independently(present, 0.3, 5, r) for r in range(1, 2001)]
    counts = np.array([np.isin(present, each) for each in drawn])
    assert counts.mean() == pytest.approx(0.3, abs=0.01)
    assert np.bincount([len(each) for each in drawn]).argmax() in range(12, 19)
    assert abs(np.corrcoef(counts.T) - np.eye(50)).max() < 0.12
    assert (draw_independently(present, 1.0, 5, 1) == present).all()


def test_without_noise_and_with_room_it_is_fedavg_of_equal_weights(tmp_path):
    plain = run(tmp_path / "plain", train__weighting="uniform")
    private = run(tmp_path / "private", privacy__clip=1e9, **SILENT)
    assert private.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-4)
    assert private.metrics.epsilon.tolist() == [math.inf] * 6
    assert private.metrics.clip_norm.tolist() == [1e9] * 6


def test_clipped_as_by_a_step_of_uploads(tmp_path):
    plain = run(tmp_path / "plain", train__weighting="uniform", train__upload=[{"clip": 0.3}])
    private = run(tmp_path / "private", privacy__clip=0.3, **SILENT)
    assert private.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-4)


def parameters(result):
    return torch.cat([value.flatten() for value in result.model().state_dict().values()]).double().numpy()


def test_the_noise_of_a_run_is_that_of_the_mechanism(tmp_path):
    silent = run(tmp_path / "silent", run__rounds=1, privacy__clip=0.5, **SILENT)
    noisy = run(tmp_path / "noisy", run__rounds=1, privacy__clip=0.5, **SILENT | {"privacy__noise": 2.0})
    difference = parameters(noisy) - parameters(silent)
    assert difference.std() == pytest.approx(2.0 * 0.5 / 5, rel=0.15)
    assert kstest(difference / (2.0 * 0.5 / 5), "norm").pvalue > 0.001


PRIVATE = {"privacy__noise": 0.8, "privacy__clip": 0.5}
ADAPTIVE = {"privacy__noise": 0.4, "privacy__clip": 0.5, "privacy__adaptive": True}


@pytest.mark.parametrize("keys", [PRIVATE, ADAPTIVE], ids=["fixed", "adaptive"])
def test_the_same_bits_anywhere_and_when_it_is_resumed(keys, tmp_path):
    keys = keys | {"run__checkpoint_every": 1}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", **keys))
    pool = "fedray.testing.pickling:PicklingPool"
    assert_same(whole, run(tmp_path / "chunks", engine__chunk=1, engine__kind=pool, **keys))
    assert whole.metrics.cohort_size.nunique() > 1
    expected = [library_epsilon(keys["privacy__noise"], 5 / 9, 1e-5, r) for r in (1, 6)]
    assert whole.metrics.epsilon.iloc[[0, -1]].tolist() == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_on_ray(tmp_path, ray_cluster):
    local = run(tmp_path / "local", **ADAPTIVE)
    on_ray = run(tmp_path / "ray", engine__kind="ray", engine__actors=3, engine__cpus_per_actor=0.3, **ADAPTIVE)
    assert local.summary["model_sha256"] == on_ray.summary["model_sha256"]


def test_a_round_without_clients_has_noise_too(tmp_path):
    """Otherwise everybody could see that nobody took part."""
    keys = {"train__cohort_size": 1, "run__rounds": 8, **PRIVATE}
    made = run(tmp_path, **keys)
    losses = [None, *made.metrics.test_loss]
    empty = made.metrics[made.metrics.cohort_size == 0]["round"].tolist()
    assert empty
    assert all(losses[r] != losses[r - 1] for r in empty if r > 1)
    assert_same(made, run(tmp_path / "again", **keys))


def test_the_length_of_a_run_adapts_itself(tmp_path):
    made = run(tmp_path, privacy__noise=0.0, run__rounds=30, privacy__participation="fixed", train__cohort_size=None)
    clips = made.metrics.clip_norm
    assert clips[0] == pytest.approx(0.1)
    # it grows by exp(0.1) until the median length is reached
    assert clips[1] == pytest.approx(0.1 * math.exp(0.1), rel=1e-5)
    assert clips.max() > 0.2
    assert clips.iloc[-1] < clips.max()


def test_private_layers_get_no_noise_and_do_not_count(tmp_path):
    keys = {"model__private": ["head"], "run__rounds": 1, "train__weighting": "uniform", "train__cohort_size": None}
    plain = run(tmp_path / "plain", **keys)
    private = run(tmp_path / "private", privacy__clip=1e9, **keys, **SILENT)
    assert private.metrics.personalized_accuracy.tolist() == plain.metrics.personalized_accuracy.tolist()
    noisy = run(tmp_path / "noisy", **keys, **SILENT | {"privacy__noise": 2.0, "privacy__clip": 0.5})
    head = [name for name, _ in noisy.model().named_parameters()][-2:]
    for name, value in noisy.model().named_parameters():
        same = bool((value == plain.model().state_dict()[name]).all())
        assert same == (name in head)


def test_nothing_moves_private_layers_in_rounds_without_clients(tmp_path):
    keys = {"model__private": ["head"], "train__cohort_size": 1, "run__rounds": 8, **PRIVATE}
    made = run(tmp_path / "made", **keys)
    assert (made.metrics.cohort_size == 0).any()
    initial = run(tmp_path / "first", **keys | {"run__rounds": 1})
    for name in [name for name, _ in made.model().named_parameters()][-2:]:
        assert torch.equal(made.model().state_dict()[name], initial.model().state_dict()[name])


def test_fedbabus_head_stays(tmp_path):
    made = run(tmp_path / "made", algorithm="fedbabu", **PRIVATE)
    longer = run(tmp_path / "longer", algorithm="fedbabu", **PRIVATE | {"run__rounds": 2})
    *base, weight, bias = [name for name, _ in made.model().named_parameters()]
    for name in (weight, bias):
        assert torch.equal(made.model().state_dict()[name], longer.model().state_dict()[name])
    assert not torch.equal(made.model().state_dict()[base[0]], longer.model().state_dict()[base[0]])


def test_on_the_clock_everybody_that_was_drawn_is_awaited(tmp_path):
    made = run(tmp_path, system__latency_ms=5.0, system__flops_per_second={"lognormal": [1e6, 1.0]}, **PRIVATE)
    assert made.metrics.cohort_size.max() > 5
    assert set(made.clients.outcome) == {"used"}


def test_epsilon_gives_noise_and_another_length_another_run(tmp_path):
    keys = {"privacy__epsilon": 20.0, "privacy__clip": 0.5, "train__cohort_size": None}
    made = run(tmp_path, **keys)
    assert made.metrics.epsilon.iloc[-1] == pytest.approx(20.0, rel=0.01)
    assert made.metrics.epsilon.iloc[-1] <= 20
    assert made.metrics.epsilon.is_monotonic_increasing
    assert load(made.folder / "config.yaml").privacy.epsilon == 20.0
    assert load(made.folder / "config.yaml").privacy.noise == noise_for(20.0, 1.0, 1e-5, "pld", 6)
    with pytest.raises(UserError, match=r"privacy\.noise"):
        run(tmp_path, **keys | {"run__rounds": 12})


def test_epsilon_is_computed_where_the_model_is_evaluated(tmp_path):
    made = run(tmp_path, run__eval_every=2, run__rounds=5, **PRIVATE)
    assert made.metrics.epsilon.notna().tolist() == [False, True, False, True, True]


def test_the_summary_has_what_was_spent(tmp_path):
    keys = {"privacy__noise": 1.0, "privacy__clip": 1.0}
    found = run(tmp_path, **keys, run__eval_every=0)
    privacy = load(found.folder / "config.yaml").privacy
    assert found.summary["delta"] == privacy.delta
    last = run(tmp_path / "again", **keys).metrics["epsilon"].iloc[-1]
    assert found.summary["epsilon"] == last
    silent = run(tmp_path / "silent", **SILENT).summary
    assert (silent["epsilon"], silent["delta"]) == (None, privacy.delta)


def test_a_larger_cohort_may_be_told(tmp_path):
    with pytest.warns(FedrayWarning, match="5 of 9 clients are simulated, with the noise and epsilon of 50 of 1000"):
        made = run(tmp_path, privacy__clients=1000, privacy__cohort=50, **PRIVATE)
    expected = library_epsilon(0.8, 0.05, 1e-5, 6)
    assert made.metrics.epsilon.iloc[-1] == pytest.approx(expected, rel=0.01)


def test_fixed_cohorts_have_a_line(tmp_path):
    with pytest.warns(
        FedrayWarning, match="privacy.participation=fixed: epsilon is that of clients who take part inde"
    ):
        made = run(tmp_path, privacy__participation="fixed", **PRIVATE)
    assert set(made.metrics.cohort_size) == {5}


def test_epsilon_and_delta_are_enough_in_small_cohorts(tmp_path):
    """S can't be adaptive with so few clients: it is the first one in all rounds."""
    keys = {"privacy__epsilon": 8.0, "privacy__delta": 1e-5}
    with pytest.warns(
        FedrayWarning, match=r"at least \d+ clients, and there are 5; it stays at 0\.1, and privacy\.clip"
    ):
        made = run(tmp_path / "two keys", **keys)
    assert {*made.metrics["clip_norm"]} == {0.1}
    assert_same(made, run(tmp_path / "all keys", **keys, privacy__clip=0.1, privacy__adaptive=False))


def test_noise_that_adapting_costs_is_said(tmp_path):
    """z_delta = 1 / sqrt(1 / 0.45^2 - 1 / (2 * 5 / 20)^2)."""
    assert 1 / math.sqrt(0.45**-2 - 0.5**-2) == pytest.approx(1.0324, rel=1e-4)
    with pytest.warns(FedrayWarning, match=r"noise of updates is z=1\.032, as a part of it is spent"):
        run(tmp_path, privacy__noise=0.45)


class Twice(FedAvg):
    """Sends something besides its model."""

    allows_aggregation = True

    def end(self, client, carry):
        return Result({"y": Upload.weighted_mean(carry["y"]), "n": Upload.sum(client.n)})


class InTwoPhases(FedAvg):
    """Sends its model twice."""

    allows_aggregation = True
    phases = ("train", "again")

    def again(self, client):
        return self.train(client)


NORMED = {"call": {"model": Normed()}, "model__name": None, "model__hidden": None}


def test_norms_may_stay_at_the_clients(tmp_path):
    assert run(tmp_path, model__private=["norm"], **NORMED, **PRIVATE).summary["status"] == "completed"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"privacy__epsilon": 8.0}, "privacy.epsilon=8 needs noise z=1.063 in 6 rounds, and privacy.noise is 0.8"),
        ({"privacy__noise": None}, "clip is set, but neither epsilon nor noise"),
        ({"privacy__clip": None, "privacy__adaptive": False}, "adaptive=false needs clip"),
        ({"privacy__adaptive": True}, "in cohorts of at least 9 clients, and there are 5"),
        ({"privacy__clients": 4}, "train.cohort_size: 5 clients in a round are more than 4"),
        ({"train__weighting": "samples"}, "does not go with train.weighting=samples"),
        ({"train__sampling": "cyclic"}, "does not go with train.sampling=cyclic"),
        ({"train__aggregation": {"kind": "median"}}, "the server gets a sum of updates alone"),
        ({"run__diagnostics": True}, "does not go with run.diagnostics"),
        ({"system__over_select": 1.4}, "does not go with system.over_select=1.4"),
        (
            {"system__deadline_seconds": 9.0, "system__server_mbps": 5.0},
            "does not go with system.deadline_seconds beside",
        ),
        ({"system__availability": {"from": 22, "to": 6}}, "does not go with system.availability"),
        ({"algorithm": f"{__file__}:InTwoPhases"}, "does not go with several phases"),
        ({"algorithm": "scaffold"}, "algorithm.name=scaffold does not say that its server's rule uses nothing"),
        (
            {"algorithm": f"{__file__}:Twice"},
            "clients may send one thing, the mean of their models y, and they send y, n",
        ),
        (NORMED, "running statistics of norm would leave clients without noise"),
    ],
)
def test_what_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        run(tmp_path, **PRIVATE | keys)
