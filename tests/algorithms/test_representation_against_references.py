"""MOON and FedSiam-DA in fedray, against their float64 references."""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import alternately, pairwise
from reference_runs import EVERYTHING, PARTICIPATION, PLAIN, SIZES, TOLERANCE, cohorts_of, distance, expect
from reference_runs import run as run_fedray
from references_representation import fedsiam_da, layer, moon, project, trainable, vector
from safetensors.numpy import load_file, save_file
from torch.nn.functional import cross_entropy

from fedray import UserError
from fedray.config import load
from fedray.experiment.resolve import resolve

WIDTH, PROJECTION = 8, 6
ROUNDS = 6
MODEL = {"model.name": "mlp", "model.hidden": [WIDTH], "model.proj_dim": PROJECTION, "model.init": None}
REFERENCE = {"moon": moon, "fedsiam_da": fedsiam_da}
HEAD = {"moon": "moon", "fedsiam_da": "siam"}
SETTINGS = {"plain": PLAIN, "everything": replace(EVERYTHING, momentum=0.9)}
SIAM_OPTIONS = [{"hist": h, "dual": d} for h in ("prev_epoch", "prev_step", "prev_round") for d in (True, False)]
VARIANTS = [
    ("moon", {"mu": 0.5, "temperature": 0.5, "buffer": 1, "first": "skip"}),
    ("moon", {"mu": 5.0, "temperature": 0.3, "buffer": 3, "first": "skip"}),
    ("moon", {"mu": 1.0, "temperature": 0.5, "buffer": 2, "first": "global"}),
    *(("fedsiam_da", {"mu": 0.5, **option}) for option in SIAM_OPTIONS),
]
SIAM = VARIANTS[3:]
PARTS = ("hidden", "projection", "classifier", "predictor.0", "predictor.1", "predictor.3")


@dataclass
class Start:
    model: dict[str, torch.Tensor]
    path: Path


def our_name(name, rank):
    """The reference's name of a tensor; whatever is not of the head is the encoder."""
    owner, kind = name.rsplit(".", 1)
    for part in PARTS:
        if f".{owner}".endswith(f".{part}"):
            return f"{part}.{kind}"
    assert kind == {2: "weight", 1: "bias"}[rank], name
    return f"encoder.{kind}"


def as_model(tensors):
    named = {our_name(name, t.ndim): torch.tensor(t).double() for name, t in tensors.items() if t.dtype == np.float32}
    assert len(named) == sum(t.dtype == np.float32 for t in tensors.values()), sorted(tensors)
    return named


def draw(name, shape, rng):
    """Not too large, so that clients go far, relative to it: otherwise FedSiam-DA's D_i would all be one."""
    value = rng.normal(size=shape)
    if name == "predictor.1.weight":
        value = 1 + 0.3 * value
    elif name == "predictor.1.running_var":
        value = np.exp(0.5 * value)
    elif len(shape) == 2:
        value = value / np.sqrt(shape[1])
    else:
        value = 0.3 * value
    return value.astype(np.float32)


def make_start(data, folder, head):
    """Random tensors by the names that fedray itself writes."""
    result = run(data, folder, "fedavg", SETTINGS["plain"], {"model.head": head, "run.rounds": 1})
    tensors = load_file(result.folder / "model.safetensors")
    rng = np.random.default_rng(9)
    for name in sorted(tensors, key=lambda name: our_name(name, tensors[name].ndim)):
        if tensors[name].dtype == np.float32:
            tensors[name] = draw(our_name(name, tensors[name].ndim), tensors[name].shape, rng)
    save_file(tensors, folder / "start.safetensors")
    return Start(as_model(tensors), folder / "start.safetensors")


@pytest.fixture(scope="module")
def starts(data, tmp_path_factory):
    return {head: make_start(data, tmp_path_factory.mktemp(head), head) for head in HEAD.values()}


def run(data, output, name, train, keys):
    return run_fedray(data, output, name, train, **({"run.rounds": ROUNDS} | MODEL | keys))


def compare(result, rounds, cohorts, data, train):
    saved = as_model(load_file(result.folder / "model.safetensors"))
    final = rounds[-1].model
    assert trainable(saved) == trainable(final)
    off = distance(vector(saved).numpy(), vector(final).numpy())
    assert off < TOLERANCE, f"relative distance {off:.1e}"

    x, y = torch.tensor(data.x_test).double(), torch.tensor(data.y_test)
    test_loss = [cross_entropy(layer(r.model, "classifier", project(r.model, x)), y).item() for r in rounds]
    expect(result.metrics["test_loss"], test_loss)
    expect(result.metrics["train_loss"], [np.mean(list(r.loss.values())) for r in rounds])
    rows = pd.read_parquet(result.folder / "clients.parquet").sort_values(["round", "client"])
    steps = [train.steps if isinstance(train.steps, int) else train.steps[i] for i in rows["client"]]
    assert list(rows["steps"]) == steps
    expect(rows["loss"], [r.loss[i] for r, cohort in zip(rounds, cohorts, strict=True) for i in cohort])


def check(data, output, name, hyper, train, start, keys, **options):
    keys = keys | {"model.weights": str(start.path)} | {f"algorithm.{key}": value for key, value in hyper.items()}
    result = run(data, output, name, train, keys)
    cohorts = cohorts_of(result)
    assert len(cohorts) == ROUNDS
    assert {len(set(c)) for c in cohorts} == {keys.get("train.cohort_size", len(SIZES))}
    rounds = REFERENCE[name](data.problem, cohorts, train, start.model, **hyper, **options)
    compare(result, rounds, cohorts, data, train)


def label(value):
    if isinstance(value, tuple):
        name, option = value
        return "-".join([name, *(f"{k}_{v}" for k, v in option.items())])
    return None


@pytest.mark.parametrize(
    ("algorithm", "setting", "participation", "weighting"),
    pairwise(VARIANTS, list(SETTINGS), list(PARTICIPATION), ("samples", "uniform")),
    ids=label,
)
def test_against_reference(data, starts, tmp_path, algorithm, setting, participation, weighting):
    name, hyper = algorithm
    train = replace(SETTINGS[setting], weighting=weighting)
    if name == "moon" and setting == "everything":
        # FedSiam-DA's server rule has no eta_g
        train = replace(train, server_lr=0.6)
    check(data, tmp_path, name, hyper, train, starts[HEAD[name]], PARTICIPATION[participation])


@pytest.mark.parametrize(("algorithm", "size"), alternately(VARIANTS, (4, 2)), ids=label)
def test_epochs_of_batches(alike, starts, tmp_path, algorithm, size):
    """Two epochs, J_i differ. In pairs, most clients have a single sample in their last batch."""
    name, hyper = algorithm
    batches = [[size] * (n // size) + [n % size] * (n % size > 0) for n in SIZES]
    assert [len(b) for b in batches] == [ceil(n / size) for n in SIZES]
    train = replace(SETTINGS["everything"], steps=tuple(2 * len(b) for b in batches), lr=0.05)
    keys = {"train.local_steps": None, "train.local_epochs": 2, "train.batch_size": size, "train.cohort_size": 4}
    check(alike, tmp_path, name, hyper, train, starts[HEAD[name]], keys, batches=batches)


@pytest.mark.parametrize("algorithm", SIAM, ids=label)
def test_steps_that_are_no_whole_epochs(alike, starts, tmp_path, algorithm):
    """Seven full batches of four, where epochs have one, two, three or five."""
    name, hyper = algorithm
    batches = [[min(4, n)] * ceil(n / 4) for n in SIZES]
    train = replace(SETTINGS["everything"], steps=7, lr=0.05)
    keys = {"train.batch_size": 4, "train.cohort_size": 4}
    check(alike, tmp_path, name, hyper, train, starts[HEAD[name]], keys, batches=batches)


@pytest.mark.parametrize("algorithm", [VARIANTS[1], *SIAM], ids=label)
def test_clients_of_one_sample(single, starts, tmp_path, algorithm):
    name, hyper = algorithm
    keys = {"train.batch_size": 4, "train.cohort_size": 4}
    check(single, tmp_path, name, hyper, SETTINGS["everything"], starts[HEAD[name]], keys)


@pytest.mark.parametrize("algorithm", [VARIANTS[1], *SIAM], ids=label)
def test_one_client_a_round(data, starts, tmp_path, algorithm):
    name, hyper = algorithm
    check(data, tmp_path, name, hyper, SETTINGS["everything"], starts[HEAD[name]], {"train.cohort_size": 1})


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
def test_moon_in_chunks(alike, starts, tmp_path, vectorize):
    name, hyper = VARIANTS[1]
    batches = [[4] * ceil(n / 4) for n in SIZES]
    train = replace(SETTINGS["everything"], steps=tuple(2 * len(b) for b in batches), lr=0.05)
    keys = {"train.local_steps": None, "train.local_epochs": 2, "train.batch_size": 4, "train.cohort_size": 4}
    keys |= {"engine.vectorize": vectorize, "engine.chunk": 4}
    check(alike, tmp_path, name, hyper, train, starts["moon"], keys, batches=batches)


@pytest.mark.parametrize("name", REFERENCE)
def test_defaults(data, starts, tmp_path, name):
    """Hyper-parameters and weights that a config leaves out."""
    train = replace(SETTINGS["plain"], weighting="samples" if name == "moon" else "uniform")
    keys = {"train.cohort_size": 3, "train.weighting": "auto"}
    check(data, tmp_path, name, {}, train, starts[HEAD[name]], keys)


@pytest.mark.parametrize("init", ["default", "zeros"])
def test_moon_first_against_an_initial_model(data, starts, tmp_path, init):
    """Models as the run draws them; cosines with a projection of zeros are zero."""

    @cache
    def drawn(client=None):
        (config,) = tmp_path.glob("*/config.yaml")
        experiment, _ = resolve(load(config))
        return as_model({name: t.numpy() for name, t in experiment.build_model(client).state_dict().items()})

    hyper = {"mu": 5.0, "first": "init", "buffer": 2}
    keys = {"train.cohort_size": 2, "model.init": init}
    check(data, tmp_path, "moon", hyper, SETTINGS["plain"], starts["moon"], keys, initial=drawn)
    projections = {drawn(i)["projection.weight"].numpy().tobytes() for i in range(len(SIZES))}
    assert len(projections) == (1 if init == "zeros" else len(SIZES))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "hyper"), [("moon", {}), ("fedsiam_da", {"dual": False})])
def test_without_their_terms_both_are_fedavg(data, starts, tmp_path, name, hyper, setting):
    train = replace(SETTINGS[setting], weighting="samples")
    start = starts[HEAD[name]]
    keys = {"train.cohort_size": 2, "model.weights": str(start.path), "model.head": HEAD[name]}
    fedavg = run(data, tmp_path / "fedavg", "fedavg", train, keys)
    named = {"algorithm.mu": 0.0} | {f"algorithm.{k}": v for k, v in hyper.items()}
    plain = run(data, tmp_path / name, name, train, keys | named)
    assert cohorts_of(plain) == cohorts_of(fedavg)
    one, other = (vector(as_model(load_file(r.folder / "model.safetensors"))).numpy() for r in (plain, fedavg))
    assert distance(one, other) < 1e-6
    rounds = REFERENCE[name](data.problem, cohorts_of(fedavg), train, start.model, mu=0.0, **hyper)
    compare(fedavg, rounds, cohorts_of(fedavg), data, train)


@pytest.mark.parametrize("name", REFERENCE)
def test_shapes_of_the_head(data, starts, tmp_path, name):
    model = starts[HEAD[name]].model
    shapes = {part: tuple(model[f"{part}.weight"].shape) for part in PARTS if f"{part}.weight" in model}
    expected = {"hidden": (WIDTH, WIDTH), "projection": (PROJECTION, WIDTH), "classifier": (3, PROJECTION)}
    if name == "fedsiam_da":
        square = (PROJECTION, PROJECTION)
        expected |= {"predictor.0": square, "predictor.1": (PROJECTION,), "predictor.3": square}
    assert shapes == expected
    default = run(data, tmp_path, name, SETTINGS["plain"], {"model.proj_dim": None, "run.rounds": 1})
    assert as_model(load_file(default.folder / "model.safetensors"))["projection.weight"].shape == (256, WIDTH)


@pytest.mark.parametrize("name", REFERENCE)
def test_logistic_regression_has_no_representation(data, tmp_path, name):
    with pytest.raises(UserError, match="logistic"):
        run_fedray(data, tmp_path, name, PLAIN)
    assert not list(tmp_path.iterdir())
