"""fedray, driven from outside, against float64 references written from the papers' rules alone."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import references
from references import Problem, Train, accuracy, loss_and_gradient
from safetensors.numpy import load_file, save_file

from fedray import simulate

SIZES = (3, 11, 7, 1, 20)
FEATURES, CLASSES = 5, 3
TESTS_PER_CLIENT = 12
ROUNDS = 10
TOLERANCE = 1e-5

PLAIN = Train(steps=4, lr=0.1)
EVERYTHING = Train(steps=3, lr=0.25, lr_decay=0.9, weight_decay=0.05, grad_clip=0.4)
SERVER_LR = {"fedavg": 0.6, "fedprox": 0.6}
HYPER = {
    "fedavg": ({}, {}),
    "fedprox": ({"mu": 0.1}, {"mu": 1.5}),
    "fednag": ({"gamma": 0.5}, {"gamma": 0.8}),
    "pfedmo": ({"gamma": 0.5, "pi": 1.0}, {"gamma": 0.7, "pi": 0.5}),
}
VARIANTS = [(name, {}) for name in ("fedavg", "fedprox", "fednag")] + [
    ("pfedmo", {"form": form, "contrast": contrast}) for form in ("velocity", "printed") for contrast in (True, False)
]
PARTICIPATION = {
    "full": {"train.sampling": "uniform"},
    "uniform": {"train.sampling": "uniform", "train.cohort_size": 2},
    "cyclic": {"train.sampling": "cyclic", "train.cohort_size": 2},
}


@dataclass
class Data:
    path: Path
    problem: Problem
    x_test: np.ndarray
    y_test: np.ndarray
    client_test: np.ndarray


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(11)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(n, shift=0.0):
        y = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, n)])[-n:]
        return (centres[y] + 1.2 * rng.normal(size=(n, FEATURES)) + shift).astype(np.float32), y.astype(np.int64)

    clients = [draw(n, rng.normal(scale=0.7, size=FEATURES)) for n in SIZES]
    public, test = draw(40), draw(TESTS_PER_CLIENT * len(SIZES))
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = np.concatenate([c[0] for c in clients]), np.concatenate([c[1] for c in clients])
    assert y.max() == CLASSES - 1
    # samples of a client need not lie together in the file
    order = rng.permutation(len(y))
    client_test = rng.permutation(np.repeat(np.arange(len(SIZES)), TESTS_PER_CLIENT))
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(
        path,
        x_train=x[order],
        y_train=y[order],
        client_train=client[order],
        x_test=test[0],
        y_test=test[1],
        client_test=client_test,
        x_public=public[0],
        y_public=public[1],
    )
    problem = Problem([c[0] for c in clients], [c[1] for c in clients], CLASSES, *public)
    return Data(path, problem, *test, client_test)


def run(data, output, name, train, **keys):
    return simulate(
        {
            "algorithm.name": name,
            "data.source": "npz",
            "data.root": str(data.path),
            "data.partition.kind": "natural",
            "model.name": "logistic",
            "model.init": "zeros",
            "train.batch_size": "full",
            "train.local_steps": train.steps,
            "train.lr": train.lr,
            "train.lr_decay": train.lr_decay,
            "train.server_lr": train.server_lr,
            "train.weight_decay": train.weight_decay,
            "train.grad_clip": train.grad_clip,
            "train.weighting": train.weighting,
            "run.rounds": ROUNDS,
            "run.seed": 5,
            "run.output": str(output),
            "run.checkpoint_every": 0,
            "engine.kind": "local",
        }
        | keys
    )


def flat(tensors):
    """Weight row by row, then bias, whatever their names are."""
    by_rank = {np.ndim(t): np.asarray(t) for t in tensors}
    assert sorted(by_rank) == [1, 2]
    assert len(tensors) == 2
    return np.concatenate([by_rank[2].ravel(), by_rank[1]]).astype(np.float64)


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    """A vector to start from, and the file that says it with the names which fedray itself writes."""
    folder = tmp_path_factory.mktemp("start")
    names = load_file(run(data, folder, "fedavg", PLAIN, **{"run.rounds": 1}).folder / "model.safetensors")
    rng = np.random.default_rng(2)
    tensors = {name: rng.normal(scale=1.5, size=t.shape).astype(np.float32) for name, t in names.items()}
    save_file(tensors, folder / "start.safetensors")
    return flat(list(tensors.values())), folder / "start.safetensors"


def cohorts_of(result):
    rows = pd.read_parquet(result.folder / "clients.parquet")
    return [sorted(int(c) for c in group["client"]) for _, group in rows.groupby("round")]


def distance(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def expect(column, values, absolute=2e-6):
    np.testing.assert_allclose(column.to_numpy(np.float64), values, rtol=TOLERANCE, atol=absolute)


def compare(result, rounds, cohorts, data, train, personal):
    final = rounds[-1].model
    assert distance(flat(list(load_file(result.folder / "model.safetensors").values())), final) < TOLERANCE
    module = [p.detach().cpu().numpy() for p in result.model().parameters()]
    assert distance(flat(module), final) < TOLERANCE

    metrics = result.metrics
    assert list(metrics["round"]) == list(range(1, ROUNDS + 1))
    assert list(metrics["cohort_size"]) == [len(c) for c in cohorts]
    expect(metrics["train_loss"], [np.mean(list(r.loss.values())) for r in rounds])
    expect(metrics["test_loss"], [loss_and_gradient(r.model, data.x_test, data.y_test)[0] for r in rounds])
    expect(metrics["test_accuracy"], [accuracy(r.model, data.x_test, data.y_test) for r in rounds])

    rows = pd.read_parquet(result.folder / "clients.parquet").sort_values(["round", "client"])
    assert (rows["steps"] == train.steps).all()
    expect(rows["loss"], [r.loss[i] for r, cohort in zip(rounds, cohorts, strict=True) for i in cohort])
    if not personal:
        assert metrics["representation_accuracy"].isna().all()
        assert metrics["personalized_accuracy"].isna().all()
        return
    scores = [r.scores[i] for r, cohort in zip(rounds, cohorts, strict=True) for i in cohort]
    if len(cohorts[0]) == len(SIZES):
        # without scores the mixing, and with it this comparison, would be idle
        assert max(scores) > 0.05
    expect(rows["score"], scores, absolute=TOLERANCE)
    expect(metrics["representation_accuracy"], [accuracy(r.representation, data.x_test, data.y_test) for r in rounds])

    # every client has as many test samples, so that it does not matter whether clients or samples are averaged
    def own(i):
        return data.x_test[data.client_test == i], data.y_test[data.client_test == i]

    expect(
        metrics["personalized_accuracy"],
        [np.mean([accuracy(x, *own(i)) for i, x in r.personal.items()]) for r in rounds],
    )


def check(data, output, name, hyper, train, keys, start=None):
    keys = keys | {f"algorithm.{key}": value for key, value in hyper.items()}
    vector = None
    if start is not None:
        vector, path = start
        keys["model.weights"] = str(path)
    result = run(data, output, name, train, **keys)
    cohorts = cohorts_of(result)
    assert len(cohorts) == ROUNDS
    assert {len(set(c)) for c in cohorts} == {keys.get("train.cohort_size", len(SIZES))}
    rounds = getattr(references, name)(data.problem, cohorts, train, vector, **hyper)
    compare(result, rounds, cohorts, data, train, personal=name == "pfedmo")
    return cohorts, rounds


def settings(name, variant, everything, weighting):
    train = EVERYTHING if everything else PLAIN
    server_lr = SERVER_LR.get(name, 1.0) if everything else 1.0
    train = Train(**{**vars(train), "weighting": weighting, "server_lr": server_lr})
    return HYPER[name][everything] | variant, train


def label(value):
    if isinstance(value, tuple):
        name, variant = value
        return "-".join([name, *(str(v) for v in variant.values())])
    return None


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("participation", PARTICIPATION)
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("algorithm", VARIANTS, ids=label)
def test_against_reference(data, start, tmp_path, algorithm, everything, participation, weighting):
    """Plain: from zeros. Everything: other hyper-parameters, a given start, decay, clipping and server lr."""
    name, variant = algorithm
    hyper, train = settings(name, variant, everything, weighting)
    check(data, tmp_path, name, hyper, train, PARTICIPATION[participation], start if everything else None)


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize("algorithm", VARIANTS, ids=label)
def test_gradient_back_ends(data, start, tmp_path, algorithm, vectorize):
    """Clients of one to twenty samples in one chunk of four and another of one."""
    name, variant = algorithm
    hyper, train = settings(name, variant, True, "samples")
    keys = {"engine.vectorize": vectorize, "engine.chunk": 4}
    check(data, tmp_path, name, hyper, train, keys, start)


@pytest.mark.parametrize("algorithm", ["fedavg", "fednag", "pfedmo"])
def test_one_client_a_round(data, start, tmp_path, algorithm):
    """The smallest cohort, in which some clients are scored for the first time late in the run."""
    hyper, train = settings(algorithm, {}, True, "samples")
    check(data, tmp_path, algorithm, hyper, train, {"train.cohort_size": 1}, start)


def test_pfedmo_clients_that_come_late(data, start, tmp_path):
    """Over several draws of cohorts, for a first participation after others were scored needs some luck."""
    late = []
    for seed in range(6):
        keys = {"train.cohort_size": 2, "run.seed": seed}
        hyper, train = settings("pfedmo", {}, True, "samples")
        cohorts, rounds = check(data, tmp_path / str(seed), "pfedmo", hyper, train, keys, start)
        for r in range(1, ROUNDS):
            unseen = set(cohorts[r]).difference(*cohorts[:r])
            if unseen and max(rounds[r - 1].scores.values()) > 0.01:
                late.append((seed, r))
    assert late


def test_cyclic_sampling_walks_through_one_permutation(data, tmp_path):
    cohorts, _ = check(data, tmp_path, "fedavg", {}, PLAIN, PARTICIPATION["cyclic"])
    # two of five at a time: five rounds visit everybody twice, and then start again
    counts = np.bincount(np.concatenate(cohorts[:5]), minlength=len(SIZES))
    assert (counts == 2).all()
    assert cohorts[5:] == cohorts[:5]
    for first in range(4):
        assert len(set(cohorts[first]) | set(cohorts[first + 1])) == 4
