"""Runs of fedray, driven from outside, and their comparison with the float64 references."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
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


def make_data(path, alike=False, sizes=SIZES):
    """Alike: a client's samples are copies of one, so that its mini-batches have the gradient of all its data."""
    rng = np.random.default_rng(11)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(n, shift=0.0):
        y = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, n)])[-n:]
        return (centres[y] + 1.2 * rng.normal(size=(n, FEATURES)) + shift).astype(np.float32), y.astype(np.int64)

    clients = [draw(n, rng.normal(scale=0.7, size=FEATURES)) for n in sizes]
    if alike:
        clients = [(np.repeat(x[:1], len(y), axis=0), np.full(len(y), i % CLASSES)) for i, (x, y) in enumerate(clients)]
    public, test = draw(40), draw(TESTS_PER_CLIENT * len(SIZES))
    client = np.repeat(np.arange(len(sizes)), sizes)
    x, y = np.concatenate([c[0] for c in clients]), np.concatenate([c[1] for c in clients])
    assert y.max() == CLASSES - 1
    # samples of a client need not lie together in the file
    order = rng.permutation(len(y))
    client_test = rng.permutation(np.repeat(np.arange(len(SIZES)), TESTS_PER_CLIENT))
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


def run(data, output, name, train, model=None, **keys):
    """A key that is None is left out. ``model`` is a module in place of the logistic regression."""
    config = {
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
        "train.momentum": train.momentum,
        "train.weighting": train.weighting,
        "run.rounds": ROUNDS,
        "run.seed": 5,
        "run.output": str(output),
        "run.checkpoint_every": 0,
        "engine.kind": "local",
    }
    keys |= {} if model is None else {"model.name": None, "model.init": None}
    return simulate({key: value for key, value in (config | keys).items() if value is not None}, model=model)


def flat(tensors):
    """Weight row by row, then bias, whatever their names are."""
    by_rank = {np.ndim(t): np.asarray(t) for t in tensors}
    assert sorted(by_rank) == [1, 2]
    assert len(tensors) == 2
    return np.concatenate([by_rank[2].ravel(), by_rank[1]]).astype(np.float64)


def make_start(data, folder):
    """A vector to start from, and the file that says it with the names which fedray itself writes."""
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
    saved = list(load_file(result.folder / "model.safetensors").values())
    module = [p.detach().cpu().numpy() for p in result.model().parameters()]
    for tensors in (saved, module):
        off = distance(flat(tensors), final)
        assert off < TOLERANCE, f"relative distance {off:.1e}"

    metrics = result.metrics
    assert list(metrics["round"]) == list(range(1, ROUNDS + 1))
    assert list(metrics["cohort_size"]) == [len(c) for c in cohorts]
    expect(metrics["train_loss"], [np.mean(list(r.loss.values())) for r in rounds])
    expect(metrics["test_loss"], [loss_and_gradient(r.model, data.x_test, data.y_test)[0] for r in rounds])
    expect(metrics["test_accuracy"], [accuracy(r.model, data.x_test, data.y_test) for r in rounds])

    rows = pd.read_parquet(result.folder / "clients.parquet").sort_values(["round", "client"])
    steps = [train.steps if isinstance(train.steps, int) else train.steps[i] for i in rows["client"]]
    assert list(rows["steps"]) == steps
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


def check(data, output, name, reference, hyper, train, keys, start=None):
    keys = keys | {f"algorithm.{key}": value for key, value in hyper.items()}
    vector = None
    if start is not None:
        vector, path = start
        keys["model.weights"] = str(path)
    result = run(data, output, name, train, **keys)
    cohorts = cohorts_of(result)
    assert len(cohorts) == ROUNDS
    assert {len(set(c)) for c in cohorts} == {keys.get("train.cohort_size", len(SIZES))}
    rounds = reference(data.problem, cohorts, train, vector, **hyper)
    compare(result, rounds, cohorts, data, train, personal=name == "pfedmo")
    return cohorts, rounds
