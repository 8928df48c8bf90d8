"""What every algorithm sends and computes, counted by hand, is what runs record and what `fedray costs` prints."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

import pytest
from processes import PROGRAM, python
from test_costs import CLASSES, FEATURES, PUBLIC, SIZES, TRAINED, Normed, cumulative, run

from fedray.algorithms import Algorithm, Carry, Result, Traffic, Upload, Work, known_algorithms
from fedray.cli.main import main
from fedray.tracking.cost_tables import extra_work

pytestmark = pytest.mark.usefixtures("own_folder")

# The model is a perceptron of 12-5-4, or one with a projection head of width 3 before its classifier: 12-5, 5-5, 5-3,
# 3-4. The counts were made by hand from the specification's overview table, not from what the algorithms declare.
HIDDEN, WIDTH = 5, 3
WEIGHTS = FEATURES * HIDDEN + HIDDEN * CLASSES
HEADED_WEIGHTS = FEATURES * HIDDEN + HIDDEN * HIDDEN + HIDDEN * WIDTH + WIDTH * CLASSES
PLAIN = WEIGHTS + HIDDEN + CLASSES
LAST = HIDDEN * CLASSES + CLASSES
HEADED = HEADED_WEIGHTS + HIDDEN + HIDDEN + WIDTH + CLASSES
PREDICTOR = 2 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH
"""The predictor has two linear layers of 3-3, and BatchNorm's scales and shifts."""
RUNNING = 2 * WIDTH
"""BatchNorm's running means and variances."""
FORWARD, HEADED_FORWARD = 2 * WEIGHTS, 2 * HEADED_WEIGHTS
PREDICTION = 2 * 2 * WIDTH * WIDTH

CLIENTS, STEPS = 3, 9
"""A round has three clients of three steps each."""
SGD = 3 * TRAINED * FORWARD
FULL_GRADIENT = 3 * sum(SIZES) * FORWARD
REPRESENTATION = 3 * 3 * 4 * FORWARD + (CLIENTS + 1) * PUBLIC * FORWARD
"""pFedMo's server makes three steps of 4 samples, and sends the probe batch through its model and each client's."""

ROUND = {
    "adabest": (1 * PLAIN, 1 * PLAIN, SGD + 2 * STEPS * PLAIN),
    "apfl": (1 * PLAIN, 1 * PLAIN, 2 * SGD + 7 * STEPS * PLAIN),
    "ditto": (1 * PLAIN, 1 * PLAIN, 2 * SGD + 2 * STEPS * PLAIN),
    "domo": (2 * PLAIN, 1 * PLAIN, SGD),
    "fastslowmo": (2 * PLAIN, 2 * PLAIN, SGD),
    "fedacg": (1 * PLAIN, 1 * PLAIN, SGD + 2 * STEPS * PLAIN),
    "fedadagrad": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedadam": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedadc": (2 * PLAIN, 1 * PLAIN, SGD),
    "fedavg": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedavgm": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedbabu": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedbn": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedcm": (2 * PLAIN, 1 * PLAIN, SGD),
    "feddyn": (1 * PLAIN, 1 * PLAIN, SGD + 4 * STEPS * PLAIN),
    "fedexp": (1 * PLAIN, 1 * PLAIN, SGD + 3 * CLIENTS * PLAIN),
    "fedhbm": (1 * PLAIN, 1 * PLAIN, SGD + 3 * STEPS * PLAIN),
    "fedmom": (1 * PLAIN, 1 * PLAIN, SGD),
    "fednag": (2 * PLAIN, 2 * PLAIN, SGD),
    "fednova": (1 * PLAIN, 1 * PLAIN, SGD),
    "fedper": (PLAIN - LAST, PLAIN - LAST, SGD),
    # a sum of features and a number of samples for each class, from a pass over all samples
    "fedproto": (CLASSES * (HIDDEN + 1), CLASSES * (HIDDEN + 1), SGD + sum(SIZES) * FORWARD),
    "fedprox": (1 * PLAIN, 1 * PLAIN, SGD + 2 * STEPS * PLAIN),
    # ten steps of the head, each with whole passes
    "fedrep": (PLAIN - LAST, PLAIN - LAST, SGD + CLIENTS * 10 * SGD / STEPS),
    # it adds three forward passes and a backward one, that costs two; the predictor runs there and back for two
    "fedsiam_da": (
        HEADED + PREDICTOR + RUNNING, HEADED + PREDICTOR + RUNNING,
        TRAINED * ((3 + 3 + 2) * HEADED_FORWARD + 2 * 3 * PREDICTION),
    ),
    "fedsam": (1 * PLAIN, 1 * PLAIN, 2 * SGD + 5 * STEPS * PLAIN),
    "fedtrip": (1 * PLAIN, 1 * PLAIN, SGD + 4 * STEPS * PLAIN),
    "fedyogi": (1 * PLAIN, 1 * PLAIN, SGD),
    "ghbm": (2 * PLAIN, 1 * PLAIN, SGD),
    "ifca": (2 * PLAIN, 1 * PLAIN, SGD + 2 * sum(SIZES) * FORWARD),
    "lg_fedavg": (LAST, LAST, SGD),
    "local_ghbm": (1 * PLAIN, 1 * PLAIN, SGD),
    "mime": (3 * PLAIN, 2 * PLAIN, SGD + FULL_GRADIENT + SGD),
    "mimelite": (2 * PLAIN, 2 * PLAIN, SGD + FULL_GRADIENT),
    "mimelitemom": (2 * PLAIN, 2 * PLAIN, SGD + FULL_GRADIENT),
    "mimemom": (3 * PLAIN, 2 * PLAIN, SGD + FULL_GRADIENT + SGD),
    "moon": (HEADED, HEADED, (3 + 2) * TRAINED * HEADED_FORWARD),
    "perfedavg": (1 * PLAIN, 1 * PLAIN, SGD + STEPS * PLAIN),
    # five steps to a personal model on each mini-batch
    "pfedme": (1 * PLAIN, 1 * PLAIN, 5 * SGD + (2 * 5 + 2) * STEPS * PLAIN),
    "pfedmo": (2 * PLAIN, 2 * PLAIN, SGD + REPRESENTATION),
    "qfedavg": (1 * PLAIN, 1 * PLAIN, SGD + sum(SIZES) * FORWARD + 4 * CLIENTS * PLAIN),
    # Table VIII's 2 (K + 1) |w|, of which the overview says nothing
    "scaffold": (2 * PLAIN, 2 * PLAIN, SGD + 2 * (STEPS + CLIENTS) * PLAIN),
    # SCAFFOLD's, and one more addition in each step
    "scaffold_m": (3 * PLAIN, 2 * PLAIN, SGD + (3 * STEPS + 2 * CLIENTS) * PLAIN),
    "slowmo": (1 * PLAIN, 1 * PLAIN, SGD),
}  # fmt: skip
"""How many numbers each client is sent and sends, and how many FLOPs the round takes."""


def test_all_are_counted_by_hand():
    assert set(ROUND) == set(known_algorithms())


@pytest.mark.parametrize("name", ROUND)
def test_a_round_of(name, tmp_path):
    """The bytes and FLOPs in metrics.csv accumulate."""
    down, up, flops = ROUND[name]
    keys = {"model__name": "mlp", "model__hidden": [HIDDEN], "model__proj_dim": WIDTH, "run__checkpoint_every": 0}
    metrics = run(tmp_path, name, **keys).metrics
    assert metrics["bytes_down"].tolist() == cumulative(CLIENTS * 4 * down)
    assert metrics["bytes_up"].tolist() == cumulative(CLIENTS * 4 * up)
    assert metrics["flops"].tolist() == cumulative(flops)


def test_norms_that_stay_are_not_counted(tmp_path):
    """A perceptron of 12-7-4 with a BatchNorm in between, of which neither scales and shifts nor statistics travel."""
    shared = FEATURES * 7 + 7 + 7 * CLASSES + CLASSES
    metrics = run(tmp_path, "fedbn", call={"model": Normed}, model__name=None).metrics
    assert metrics["bytes_down"].tolist() == metrics["bytes_up"].tolist() == cumulative(CLIENTS * 4 * shared)
    plain = run(tmp_path, "fedavg", call={"model": Normed}, model__name=None).metrics
    assert metrics["flops"].tolist() == plain["flops"].tolist()


def test_scaffolds_first_option(tmp_path):
    metrics = run(tmp_path, "scaffold", model__name="mlp", model__hidden=[HIDDEN], algorithm__option=1).metrics
    assert metrics["flops"].tolist() == cumulative(SGD + 2 * (STEPS + CLIENTS) * PLAIN + FULL_GRADIENT)


def test_dittos_own_steps(tmp_path):
    """Two steps of the personal model, each with four samples, or all three, and two vectors: the pull and the step."""
    metrics = run(tmp_path, "ditto", model__name="mlp", model__hidden=[HIDDEN], algorithm__personal_steps=2).metrics
    assert metrics["flops"].tolist() == cumulative(SGD + 2 * 3 * (4 + 4 + 3) * FORWARD + 2 * 2 * CLIENTS * PLAIN)


def test_epochs_of_fedreps_head(tmp_path):
    """Two passes there and back over all samples, also over those that a step of three mini-batches leaves out."""
    metrics = run(tmp_path, "fedrep", model__name="mlp", model__hidden=[HIDDEN], algorithm__head_epochs=2).metrics
    assert metrics["flops"].tolist() == cumulative(SGD + 2 * 3 * sum(SIZES) * FORWARD)


def compared(*arguments):
    """Runs `fedray costs`, which must succeed, and returns its table by algorithm and column."""
    assert main(["costs", *arguments, "--csv", "costs.csv"]) == 0
    with Path("costs.csv").open(newline="") as file:
        return {row["algorithm"]: row for row in csv.DictReader(file)}


def refused(capsys, *arguments):
    """Runs `fedray costs`, which must fail, and returns what it writes to stdout and its one line on stderr."""
    assert main(["costs", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fedray: ")
    assert err.count("\n") == 1
    return out, err


def test_costs_of_a_run(tmp_path):
    """The table has the bytes and FLOPs of metrics.csv for a round of three clients, and fedavg's on the same data."""
    keys = {"model__name": "mlp", "model__hidden": [HIDDEN], "model__proj_dim": WIDTH}
    arguments = ["model.name=mlp", f"model.hidden=[{HIDDEN}]", f"model.proj_dim={WIDTH}"]
    arguments += ["data.source=npz", "data.root=data.npz", "data.partition.kind=natural"]
    arguments += ["train.local_steps=3", "train.batch_size=4"]
    for name, hyper, words in (
        ("moon", {"buffer": 3}, "moon head + 4 fwd per step"),
        ("pfedmo", {"probe_batch": 7}, "-"),
        ("test_costs_command:Sloppy", {}, "7 J|w|"),
    ):
        metrics = run(tmp_path, name, **keys, **{f"algorithm__{key}": value for key, value in hyper.items()}).metrics
        table = compared(*arguments, f"algorithm.name={name}", *(f"algorithm.{k}={v}" for k, v in hyper.items()))
        assert set(table) == {*known_algorithms(), name}
        row = table[name]
        gflops = CLIENTS * float(row["GFLOPs"]) + float(row["server GFLOPs"])
        assert gflops * 1e9 == pytest.approx(metrics["flops"][0], rel=1e-12)
        assert CLIENTS * int(row["bytes down"]) == metrics["bytes_down"][0]
        assert CLIENTS * int(row["bytes up"]) == metrics["bytes_up"][0]
        assert row["extra"] == words
    assert table["fedrep"]["extra"] == "10 further steps"
    row = table["fedavg"]
    assert (row["parameters"], row["models down"], row["vectors down"], row["extra %"]) == (str(PLAIN), "1", "0", "0.0")
    assert float(row["GFLOPs"]) * 1e9 == pytest.approx(SGD / 3)
    assert float(table["mime"]["extra %"]) == pytest.approx(100 * (1 + sum(SIZES) / TRAINED))
    assert (table["mime"]["overhead"], table["moon"]["parameters"]) == ("2.5", str(HEADED))
    assert float(table["pfedmo"]["server GFLOPs"]) * 1e9 == pytest.approx(REPRESENTATION)


@pytest.mark.parametrize("field", [field.name for field in fields(Work)])
def test_all_work_is_told(field):
    assert extra_work(Work(**{field: 2})).startswith("2 ")


class Sloppy(Algorithm):
    """A user's own algorithm that declares more work than it does."""

    work = Work(per_step=7)
    traffic = Traffic(models_down=0.5)

    def begin(self, client):
        return Carry({"y": client.start("x")})

    def step(self, client, carry, batch):
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch))

    def end(self, client, carry):
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(self, server, phase, sums, scalars):
        server.move(sums["y"])


def test_what_a_config_asks_for_does_not_stop_the_others(capsys):
    """Algorithms that a config leaves without a head's representation or a public set are left out of the table."""
    asked = ["algorithm.name=fedavg", "model.name=logistic", "data.public_samples=0", "train.server_lr=0.5"]
    table = compared(*asked)
    assert set(known_algorithms()) - set(table) == {"moon", "fedproto", "fedsiam_da", "pfedmo"}
    out = capsys.readouterr().out
    assert "without moon: model.head=moon: model logistic has no representation" in out
    assert "without pfedmo: data.public_samples=0" in out


@pytest.mark.parametrize(
    "keys",
    [
        ["privacy.noise=1.0", "privacy.clip=1"],
        ["train.aggregation.kind=median", "attack.kind=ipm", "attack.fraction=0.2"],
        ["train.sampling={kind: oort, seconds: 3}", "system.latency_ms=5"],
    ],
    ids=["privacy", "attack", "oort"],
)
def test_what_few_algorithms_allow_does_not_stop_the_others(keys, capsys):
    assert main(["costs", "algorithm.name=fedavg", *keys]) == 0
    assert "scaffold" in capsys.readouterr().out


def test_candidates_are_counted(capsys):
    sampling = "train.sampling={kind: power_of_choice, candidates: 6}"
    assert main(["costs", "algorithm.name=fedavg", "model.name=mlp", "train.cohort_size=4", sampling]) == 0
    out = capsys.readouterr().out
    parameters = 784 * 100 + 100 + 100 * 10 + 10
    assert f"receive {6 * 4 * parameters:,.6g} bytes, send 24, and compute" in out


def test_momentum_that_is_kept_does_not_stop_the_others(capsys):
    keys = ["algorithm.name=fedavg", "train.momentum=0.9", "train.momentum_reset=never", "model.name=mlp"]
    assert main(["costs", *keys]) == 0
    assert "scaffold" in capsys.readouterr().out


def test_a_head_for_all_is_no_extra():
    table = compared("algorithm.name=fedavg", "model.head=moon")
    assert table["fedavg"]["parameters"] == table["moon"]["parameters"]
    assert (table["fedavg"]["extra %"], table["moon"]["extra"]) == ("0.0", "2 fwd per step")
    assert table["fedsiam_da"]["extra"].startswith("siam head + ")


def test_the_program(tmp_path):
    Path("mine.yaml").write_text("algorithm: {name: fedprox, mu: 0.1}\nmodel: {name: mlp}\n")
    done = python(PROGRAM, "costs", "mine.yaml", "data.clients=4")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1].split()[:2] == ["algorithm", "parameters"]
    assert [line.split()[0] for line in lines[2:]][: len(ROUND)] == list(known_algorithms())
    assert "mean one: 2,500 samples, 20 steps, 1,280 samples in their batches" in done.stdout
    assert not any(line.endswith(" ") or "\x1b" in line for line in lines)
    assert not Path("runs").exists()


def test_mistakes(capsys):
    for arguments, message in (
        (["train.lrr=1"], "unknown key train.lrr (did you mean 'train.lr'?)"),
        (["algorithm.name=fedporx"], "did you mean 'fedprox'?"),
        (["algorithm.name=moon", "model.name=logistic"], "model logistic has no representation"),
        (["a.yaml"], "can't read the config file a.yaml: No such file"),
        (["model.name=logistic", "--csv", "no/such.csv"], "--csv no/such.csv: No such file or directory"),
        (["model.name=logistic", "--csv", "."], "--csv .: Is a directory"),
    ):
        assert message in refused(capsys, *arguments)[1]
    assert main(["csots"]) == 2
    assert "did you mean 'costs'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["costs", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: fedray costs")
