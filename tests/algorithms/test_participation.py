"""Every algorithm where clients come late, stay away for long, come alone, or have next to no data."""

from dataclasses import dataclass, field
from math import ceil, log

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import pairwise

from fedray.algorithms import known_algorithms
from fedray.config import load
from fedray.engine.clients import PRIVATE
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source
from fedray.tracking.result import RunResult

# a single sample, less than a batch, exactly one, one and a single sample more, many
SIZES = [1, 3, 8, 9, 20, 33, 60]
ROUNDS, BATCH, STEPS, EPOCHS = 12, 8, 3, 2

SETTINGS = {
    "data.clients": len(SIZES),
    "data.partition.kind": "quantity_skew",
    "data.partition.sizes": SIZES,
    "model.name": "mlp",
    "model.hidden": [8],
    "train.batch_size": BATCH,
    "train.lr": 0.05,
    "run.rounds": ROUNDS,
    "run.eval_every": 4,
    "run.checkpoint_every": 0,
    "engine.kind": "local",
    "engine.vectorize": False,
}
PARTICIPATION = {
    "cyclic-two": {"train.sampling": "cyclic", "train.cohort_size": 2},
    "cyclic-one": {"train.sampling": "cyclic", "train.cohort_size": 1},
    "uniform-two": {"train.cohort_size": 2, "run.seed": 35},
}
LOCAL = {"steps": {"train.local_steps": STEPS}, "epochs": {"train.local_epochs": EPOCHS}}
# at eta_g = 1, an adaptive server throws a model of a hundred weights across the room
CALM = {name: {"train.server_lr": 0.05} for name in ("fedadagrad", "fedadam", "fedyogi")}
# state that an option brings in, that begins in another way, or that is there in part after one participation
VARIANTS = {
    "slowmo-maintain": {"algorithm.buffer": "maintain", "train.momentum": 0.5},
    "fedhbm-random": {"algorithm.variant": "random", "algorithm.beta": 0.5},
    "moon-buffer": {"algorithm.buffer": 3},
}
ALGORITHMS = {name: {} for name in known_algorithms()} | CALM | VARIANTS


@dataclass
class Run:
    """A run, the names of its algorithm's client state, and after each round states and last participations."""

    result: RunResult
    names: set
    states: list = field(default_factory=list)
    last: list = field(default_factory=list)


def simulate(folder, label, settings):
    name = label.partition("-")[0]
    config = SETTINGS | {"algorithm.name": name, "run.output": str(folder)} | ALGORITHMS[label] | settings
    if known_algorithms()[name].needs_public:
        config["data.public_samples"] = 60
    experiment, data = resolve(load(config), CustomObjects(small_source()))
    algorithm = experiment.algorithm
    result = RunResult(folder / experiment.config.run.name, experiment.module)
    private = {PRIVATE} if experiment.private else set()
    run = Run(result, {*algorithm.client_state, *algorithm.client_models, *algorithm.client_numbers, *private})

    def pool(worker):
        return LocalPool(worker), [describe("cpu")]

    with computing_process(1, False), open_run(experiment, data, pool, False) as opened_run:
        for _ in opened_run.rounds():
            state, read = opened_run.state, opened_run.worker.clients.states.read
            run.states.append({client: read(file) for client, file in state.clients.items()})
            run.last.append(dict(state.server.last_round))
    return run


CASES = [
    pytest.param(each.values, marks=each.marks, id="-".join(each.values))
    for each in pairwise(list(ALGORITHMS), list(PARTICIPATION), list(LOCAL))
]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def run(case, tmp_path_factory):
    label, participation, local = case
    return simulate(tmp_path_factory.mktemp("run"), label, PARTICIPATION[participation] | LOCAL[local])


def cohorts(result):
    return [list(rows["client"]) for _, rows in result.clients.groupby("round")]


def test_a_run_completes_and_stays_finite(run):
    metrics = run.result.metrics
    assert run.result.summary["status"] == "completed"
    assert list(metrics["round"]) == list(range(1, ROUNDS + 1))
    assert metrics["train_loss"].max() < 5 * log(4)
    assert metrics["test_loss"].notna().sum() == ROUNDS / 4
    assert metrics["test_loss"].max() < 5 * log(4)
    assert np.isfinite(run.result.clients["loss"]).all()
    assert all(torch.isfinite(p).all() for p in run.result.model().parameters())


def test_samples_and_steps_of_clients(run, case):
    rows = run.result.clients
    assert list(rows["samples"]) == [SIZES[client] for client in rows["client"]]
    expected = [STEPS if case[2] == "steps" else EPOCHS * ceil(n / BATCH) for n in rows["samples"]]
    assert list(rows["steps"]) == expected
    per_round = pd.Series(expected).groupby(rows["round"]).max()
    assert list(run.result.metrics["iterations"]) == list(per_round.cumsum())


def test_states_are_those_of_participants(run):
    """Who was not there keeps the state that it had."""
    seen, before = {}, {}
    for number, cohort in enumerate(cohorts(run.result), 1):
        seen |= dict.fromkeys(cohort, number)
        states = run.states[number - 1]
        assert run.last[number - 1] == seen
        assert set(states) == (set(seen) if run.names else set())
        for client, state in states.items():
            assert set(state) == run.names
            assert all(np.isfinite(vector).all() for vector in state.values())
            if client not in cohort:
                for name, vector in state.items():
                    np.testing.assert_array_equal(vector, before[client][name])
        before = states


@pytest.mark.parametrize("participation", PARTICIPATION)
def test_cohorts_are_as_uneven_as_these_tests_mean_them(participation, tmp_path):
    result = simulate(tmp_path, "fedavg", PARTICIPATION[participation] | LOCAL["steps"]).result
    rounds = {client: list(rows["round"]) for client, rows in result.clients.groupby("client")}
    first, gaps = max(seen[0] for seen in rounds.values()), {g for seen in rounds.values() for g in np.diff(seen)}
    assert set(map(len, cohorts(result))) == {1 if participation == "cyclic-one" else 2}
    # seven clients in turn, two at a time, come every third or fourth round
    expected = {"cyclic-two": (4, {3, 4}), "cyclic-one": (7, {7})}
    if participation in expected:
        assert (first, gaps) == expected[participation]
        assert sorted(rounds) == list(range(len(SIZES)))
    else:
        assert first > ROUNDS / 2
        assert max(gaps) >= 5
        assert 1 in gaps
