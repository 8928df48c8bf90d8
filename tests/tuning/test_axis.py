"""On which axis trials are compared: found from what is searched, kept by a sweep that has begun, and drawn."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from pages import Page

from fedray.cli.main import main
from fedray.config import load
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.axis import RoundCost, axis_of_equal_work, cost_of_a_round
from fedray.tuning.curves import learning_curves, runs_of
from fedray.tuning.opening import open_sweep
from fedray.tuning.report import write_report
from fedray.tuning.spec import known_spaces, merge_settings, read_record, read_sweeps
from fedray.tuning.trial import TrialEnd, run_trial

LR = {"train.lr": {"uniform": [0.01, 0.5]}}


def described(space, **base):
    settings = {k: v for k, v in SETTINGS.items() if k not in ("train.local_epochs", "data.public_samples")}
    settings |= {"algorithm.name": "fedprox", "train.local_steps": 4, "run.rounds": 10}
    return {
        "base": settings | {key.replace("__", "."): value for key, value in base.items()},
        "spaces": {"wide": {**LR, **space}},
    }


def opened(tmp_path, values, *overrides):
    (spec,) = read_sweeps(values, [f"tune.output={tmp_path}", "tune.name=s", *overrides])
    return open_sweep(spec, CustomObjects(small_source()))


def axis_of(tmp_path, values, *overrides):
    """The axis that the sweep is run on, which its record has too; and what is said of it."""
    with opened(tmp_path, values, *overrides) as sweep:
        axis = sweep.next_trial().axis
        assert read_record(tmp_path / "s")["tune"]["pruner"]["axis"] == axis
        return axis, [note for note in sweep.notes if "pruned" in note]


@pytest.mark.parametrize(
    ("base", "others", "objective", "axis"),
    [
        ((100, 10), [], "validation_accuracy", "rounds"),
        ((100, 10), [(100, 10), (100.5, 10)], "validation_accuracy", "rounds"),
        ((100, 10), [(100, 10), (102, 10)], "validation_accuracy", "flops"),
        ((100, 10), [(100, 20)], "train_loss", "bytes"),
        ((100, 10), [(50, 20)], "validation_accuracy", "flops"),
        # at equal FLOPs all trials have the same FLOPs
        ((100, 10), [(50, 20)], "flops", "bytes"),
        ((100, 10), [(50, 20)], "bytes", "flops"),
        ((100, 10), [(50, 10)], "flops", "rounds"),
        ((100, 10), [(100, 20)], "bytes_up", "rounds"),
    ],
)
def test_trials_are_compared_by_what_their_rounds_differ_in(base, others, objective, axis):
    assert axis_of_equal_work(RoundCost(*base), [RoundCost(*other) for other in others], objective) == axis


@pytest.mark.parametrize(
    ("space", "base", "axis"),
    [
        ({"algorithm.mu": {"uniform": [0, 1]}}, {}, "rounds"),
        ({"train.momentum": {"uniform": [0, 0.9]}}, {}, "rounds"),
        ({"train.local_steps": {"choice": [4, 8]}}, {}, "flops"),
        ({"train.local_epochs": {"int": [1, 3]}}, {"train.local_steps": None, "train.local_epochs": 1}, "flops"),
        ({"train.batch_size": {"choice": [8, 16]}}, {}, "flops"),
        # an epoch is an epoch in batches of any size
        ({"train.batch_size": {"choice": [8, 9]}}, {"train.local_steps": None, "train.local_epochs": 2}, "rounds"),
        ({"train.cohort_size": {"int": [2, 5]}}, {}, "flops"),
        ({"train.participation": {"uniform": [0.2, 0.9]}}, {"train.cohort_size": None}, "flops"),
        ({"model.hidden": {"choice": [[8], [16]]}}, {}, "flops"),
        ({"data.samples_per_client": {"choice": [20, 36]}},
         {"train.local_steps": None, "train.local_epochs": 1, "data.partition.kind": "iid"}, "flops"),
        # its server sends and gets a buffer more, which takes hardly any arithmetic
        ({"algorithm.buffer": {"choice": ["reset", "average"]}},
         {"algorithm.name": "slowmo", "train.momentum": 0.5, "train.batch_size": 64}, "bytes"),
    ],
)  # fmt: skip
def test_the_axis_is_found_from_what_is_searched(space, base, axis, tmp_path):
    values = described(space)
    values["base"] = {key: value for key, value in {**values["base"], **base}.items() if value is not None}
    assert axis_of(tmp_path, values) == (axis, [])
    # with the learning rate alone all rounds are alike
    assert axis_of(tmp_path / "lr", {**values, "spaces": {"wide": LR}}) == ("rounds", [])


def test_pruning_by_bytes_of_unequal_work_is_said(tmp_path):
    values = described({"train.local_steps": {"choice": [4, 8]}})
    axis, (line,) = axis_of(tmp_path, values, "tune.pruner.axis=bytes", "tune.pruner.kind=asha")
    assert axis == "bytes"
    assert line.startswith(
        "s: trials are pruned at equal bytes, and the flops that these take depend on train.local_st"
    )


def test_pruning_by_rounds_of_unequal_work_is_said(tmp_path):
    values = described({"train.local_steps": {"choice": [4, 8]}, "model.hidden": {"choice": [[8], [32]]}})
    options = ("tune.pruner.axis=rounds", "tune.pruner.kind=asha")
    axis, notes = axis_of(tmp_path, values, *options)
    assert axis == "rounds"
    assert notes == [
        "s: trials are pruned at equal rounds, and the flops that these take depend on train.local_steps and "
        "model.hidden; tune.pruner.axis=flops compares them at equal work"
    ]
    # nothing to say where nothing is pruned, or work is equal
    assert axis_of(tmp_path / "a", values, "tune.pruner.axis=rounds") == ("rounds", [])
    assert axis_of(tmp_path / "b", values, "tune.pruner.axis=flops", "tune.pruner.kind=asha") == ("flops", [])
    assert axis_of(tmp_path / "c", described({}), *options) == ("rounds", [])


def test_a_sweep_that_has_begun_keeps_its_axis(tmp_path):
    """As one does that was begun when rounds were the default; its record is a space file that says so."""
    values = described({"train.local_steps": {"choice": [4, 8]}})
    assert axis_of(tmp_path, values, "tune.pruner.axis=rounds", "tune.pruner.kind=asha")[0] == "rounds"
    for again in (values, tmp_path / "s"):
        axis, notes = axis_of(tmp_path, again, "tune.pruner.kind=asha")
        assert axis == "rounds"
        assert len(notes) == 1
    with pytest.raises(UserError, match=r"\(tune.pruner differs\)"):
        axis_of(tmp_path, values, "tune.pruner.axis=flops", "tune.pruner.kind=asha")
    assert axis_of(tmp_path, values, "tune.pruner.kind=asha", "tune.resume=false") == ("flops", [])


@pytest.mark.parametrize("name", known_spaces())
def test_spaces_that_come_with_fedray_compare_equal_work(name):
    """Two things that they search change a round's cost: local steps, and SCAFFOLD's option 1, a full gradient more."""
    (spec,) = read_sweeps(name, ["data.source=sample"])[:1]
    small = {"model.name": "mlp", "model.hidden": [8], "data.clients": 20, "data.partition.kind": "iid"}
    base = {key: value for key, value in spec.base.items() if not key.startswith(("data.", "model.name"))} | small
    own = CustomObjects(small_source())
    experiment, data = resolve(load(base), own)
    assert spec.tune.pruner.axis == "auto"
    costs = [cost_of_a_round(*resolve(load(merge_settings(base, values)), own)) for values in spec.space.extremes(base)]
    axis = axis_of_equal_work(cost_of_a_round(experiment, data), costs, "validation_accuracy")
    of_work = {"local_steps", "option", "head_steps", "inner_steps", "models"}
    assert (axis == "flops") == bool(of_work & {key.rpartition(".")[2] for key in spec.raw_space})


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of three trials of 10 or 20 steps a round, without Ray: one complete, one pruned, one failed."""
    folder = tmp_path_factory.mktemp("swept")
    values = described({"train.local_steps": {"choice": [2, 4]}})
    with opened(folder, values, "tune.trials=3", "tune.sampler=random", "tune.seed=3") as sweep:
        for number in range(2):
            assignment = sweep.next_trial()
            run_trial(
                assignment, CustomObjects(small_source()), lambda message, n=number: sweep.report(str(n), message)
            )
            sweep.report(str(number), TrialEnd("ValueError: no") if number else TrialEnd(None))
        sweep.next_trial()
    (spec,) = read_sweeps(folder / "s")
    return spec


def test_the_page_of_a_sweep(swept, capsys):
    """The failed trial is among its trials."""
    assert main(["report", str(swept.folder)]) == 0
    assert capsys.readouterr().out == f"wrote {swept.folder / 'report.html'}\n"
    page = Page((swept.folder / "report.html").read_text())
    page.check()
    assert "train.local_steps {choice: [2, 4]}" in page.text
    assert "failed" in page.text
    assert {"history", "curves"} <= {path.stem for path in (swept.folder / "report").glob("*.png")}
    assert len(page.all("img")) == len(list((swept.folder / "report").glob("*.png")))


def test_learning_curves_are_over_the_axis_of_the_sweep(swept):
    """Of a sweep whose rounds differ in work: FLOPs as in metrics.csv, not steps from 1 to 20."""
    assert swept.tune.pruner.axis == "flops"
    names = {path.name for path in write_report(swept)}
    assert "curves.png" in names
    trials = pd.DataFrame({"trial": [0, 1, 2], "state": ["complete", "failed", "running"]})
    folders = [swept.trial_folder(number) for number in range(3)]
    for axis, column in (("flops", "flops"), ("rounds", "round")):
        figure = learning_curves(trials, folders, axis, "validation_accuracy", "mine")
        (line,) = figure.axes[0].lines
        (rows,) = runs_of(folders[0])
        assert list(line.get_xdata()) == rows[column].tolist()
        assert list(line.get_ydata()) == rows["validation_accuracy"].tolist()
        assert figure.axes[0].get_xlabel() == {"flops": "FLOPs", "rounds": "rounds"}[axis]
        assert figure.axes[0].get_title() == "mine: a line per trial\nnot drawn: 1 failed, 1 running"
    assert learning_curves(trials, folders, "flops", "flops", "mine") is None
    assert learning_curves(trials[1:], folders[1:], "flops", "validation_accuracy", "mine") is None


def test_the_only_space_needs_no_name(tmp_path):
    (spec,) = read_sweeps({**described({}), "spaces": {"mine": LR}})
    assert spec.tune.space == "mine"
    assert list(spec.raw_space) == ["train.lr"]
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.yaml").write_text(yaml.safe_dump(spec.record()))
    assert read_sweeps(tmp_path / "s")[0].record()["spaces"] == {"mine": LR}
    (spec,) = read_sweeps({**described({}), "spaces": {1: LR}})
    assert spec.tune.space == "1"


def test_of_several_spaces_one_is_called_as_asked():
    several = {**described({}), "spaces": {"wide": LR, "paper": {"train.lr": {"grid": [0.1]}}}}
    assert read_sweeps(several)[0].tune.space == "wide"
    assert read_sweeps(several, ["tune.space=paper"])[0].tune.space == "paper"
    without = {**described({}), "spaces": {"mine": LR, "paper": LR}}
    with pytest.raises(UserError, match=r"there is no space 'wide' \(there are: mine, paper\)"):
        read_sweeps(without)
    with pytest.raises(UserError, match=r"there is no space 'papre' \(did you mean 'paper'\?\)"):
        read_sweeps(without, ["tune.space=papre"])
    # one that is asked for is not replaced by the only one
    with pytest.raises(UserError, match=r"there is no space 'wild'"):
        read_sweeps(described({}), ["tune.space=wild"])
