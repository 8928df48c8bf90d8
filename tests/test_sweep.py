"""Sweeps without Ray: what a space file means, what a driver makes of trials' messages, and the sums of resources."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

import fedray
from fedray.algorithms import known_algorithms
from fedray.cli import main
from fedray.config import flat, load, read_file
from fedray.errors import UserError
from fedray.experiment import Own
from fedray.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.folder import read_metrics
from fedray.tuning import report
from fedray.tuning.axis import STEPS, budget_of, steps_reached, value_of
from fedray.tuning.opening import open_sweep, trials_of
from fedray.tuning.resources import _fitting
from fedray.tuning.spec import check_together, known_spaces, merge_settings, read_sweeps
from fedray.tuning.suite import known_suites, read_suite
from fedray.tuning.trial import Round, RunEnd, TrialEnd, run_trial

SPACE = {"algorithm.mu": {"loguniform": [0.001, 1]}, "train.lr": {"uniform": [0.01, 0.5]}}


def described(**more):
    base = {k: v for k, v in SETTINGS.items() if k != "train.local_epochs"}
    base |= {"algorithm.name": "fedprox", "train.local_steps": 4, "run.rounds": 10}
    return {"base": base, "spaces": {"wide": SPACE}, **more}


def opened(tmp_path, *overrides, say=print, **more):
    (spec,) = read_sweeps(described(**more), [f"tune.output={tmp_path}", "tune.name=s", *overrides])
    return open_sweep(spec, Own(small_source()), say)


class Said(Exception):
    @classmethod
    def at_once(cls, line):
        raise cls(line)


def row(round, accuracy=0.5, size=100):
    return {"round": round, "bytes_down": size * round, "bytes_up": size * round, "flops": 7.0 * round,
            "validation_accuracy": accuracy}  # fmt: skip


def told(sweep, number, rounds, accuracies, run=0, runs=1):
    """Whether the sweep stops the trial, after each of its rounds."""
    answers, before = [], 0
    for round, accuracy in zip(rounds, accuracies, strict=True):
        step = round * STEPS // 10
        answers.append(
            sweep.report(
                str(number),
                Round(run, range(before + 1, step + 1), row(round, accuracy), round == 10 and run + 1 == runs),
            )
        )
        before = step
        if answers[-1]:
            break
    return answers


def ends(sweep, number, accuracy, runs=1):
    for run in range(runs):
        sweep.report(str(number), RunEnd(run, "completed", row(10, accuracy)))
    sweep.report(str(number), TrialEnd(None))


# ---------------------------------------------------------------- space files


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"baes": {}}, (), "there is no section 'baes' (did you mean 'base'?)"),
        ({"spaces": {}}, (), "spaces: give at least one, as in"),
        ({"spaces": []}, (), "spaces: give at least one, as in"),
        ({"spaces": 3}, (), "spaces must be a section, not 3"),
        ({}, ("tune.space=wid",), "there is no space 'wid' (did you mean 'wide'?)"),
        ({}, ("tune.trials=0",), "tune.trials must be at least 1, not 0"),
        ({}, ("tune.trails=3",), "unknown key tune.trails (did you mean 'tune.trials'?)"),
        ({}, ("tune.sampler=tpee",), "did you mean 'tpe'?"),
        ({}, ("tune.search=tpe",), "unknown key tune.search (there are: max_concurrent_trials, name,"),
        ({}, ("tune.prune.by=asha",), "unknown key tune.prune (did you mean 'tune.pruner'?)"),
        (
            {},
            ("tune.pruner.startup=3",),
            "(did you mean 'tune.pruner.n_startup_trials'?)",
        ),
        ({}, ("tune.pruner.kind=ahsa",), "did you mean 'asha'?"),
        ({}, ("tune.sampler=grid",), "every key needs a list (grid or choice); use tpe"),
        ({}, ("tune.objective=test_accuracy",), "test_accuracy is measured on the test set"),
        ({}, ("tune.objective=accuracy",), "there is no column 'accuracy'"),
        ({}, ("tune.objective={}",), "must name at least one column"),
        ({}, ("tune.objective={bytes: least}",), "must be 'max' or 'min'"),
        (
            {},
            ("tune.objective={validation_accuracy: max, bytes: min}", "tune.pruner.kind=asha"),
            "goes with one objective",
        ),
        ({}, ("tune.objective={validation_accuracy: max, bytes: min}", "tune.sampler=cmaes"), "cmaes goes with one"),
        ({"first": [{"algorithm.muu": 1}]}, (), "first: algorithm.muu is not searched (did you mean 'algorithm.mu'?)"),
        ({"environments": {"data.partition.alpha": [0.1, 0.1]}}, (), "two of them have the same name"),
        ({}, ("run.name=x",), "run.name is set by the sweep; use tune.name"),
        ({}, ("run.eval_test=true",), "run.eval_test is set by the sweep"),
        ({"spaces": {"wide": {"engine.threads": {"choice": [1, 2]}}}}, (), "engine.threads can't be searched"),
        ({"spaces": {"wide": {"data.source": {"choice": ["a", "b"]}}}}, (), "data.source can't be searched"),
        ({"environments": {"data.partition.alpha": 3}}, (), "data.partition.alpha needs a list of values, not 3"),
        ({"environments": {"train.lr": [0.1, 0.3]}}, (), "environments: train.lr is searched; it can't be"),
        (
            {"spaces": {"wide": {1: {"choice": [1, 2]}}}},
            ("tune.max_concurrent_trials=0",),
            "tune.max_concurrent_trials must be at least 1, not 0",
        ),
        ({}, ("tune=3",), "tune must be a section, not 3"),
        ({}, ("tune.name=../up",), "must be a folder's name, not '../up'"),
        ({}, (f"tune.name={'x' * 151}",), "is longer than 150 bytes"),
        ({}, ("tune.name=/up",), "must be a folder's name"),
        ({}, ("tune.name=.",), "must be a folder's name"),
        ({}, ('tune.name="a\\0b"',), "must be a folder's name"),
        ({}, (f"tune.output={'x' * 300}",), "must be a local folder"),
        ({}, ("tune.storage=sqlite://",), "tune.storage=sqlite:// keeps nothing"),
        ({}, ("tune.seeds=1e30",), "tune.seeds must be at most 1000"),
        (
            {"base": {"run.rounds": "four"}, "spaces": {"wide": {"train.local_steps": {"choice": [1, 2]}}}},
            (),
            "run.rounds",
        ),
        ({"environments": {"data.source": ["a", "b"]}}, (), "data.source can't be searched"),
        ({"first": {"algorithm.mu": 1}}, (), "first must be a list"),
        ({"base": "nowhere.yaml"}, (), "can't read the config file nowhere.yaml"),
    ],
)
def test_one_line_for_what_is_wrong_in_a_space_file(values, overrides, message):
    with pytest.raises(UserError) as error:
        read_sweeps({**described(), **values}, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "more", "message"),
    [
        (["algorithm.muu=1"], {}, "unknown key algorithm.muu (did you mean 'algorithm.mu'?)"),
        ([], {"spaces": {"wide": {"algorithm.mew": {"uniform": [0, 1]}}}}, "unknown key algorithm.mew"),
        (
            [],
            {"spaces": {"wide": {"algorithm.mu": {"uniform": [-1, 1]}}}},
            "with algorithm.mu=-1: algorithm.mu must be",
        ),
        ([], {"spaces": {"wide": {"model.name": {"choice": ["mlp", "lenet6"]}}}}, "with model.name=lenet6"),
        (["data.validation_samples=0"], {}, "needs data.validation_samples"),
        (["tune.objective=virtual_seconds"], {}, "virtual_seconds is not recorded"),
        (["tune.objective=train_accuracy"], {}, "needs run.eval_train_samples"),
        (["tune.storage=nothing://"], {}, "tune.storage=nothing://"),
        (["tune.resume=true"], {}, "tune.resume=true, but there is no sweep in"),
        ([f"run.seed={2**63 - 1}"], {}, "leaves no room for further seeds"),
        (
            [],
            {"spaces": {"wide": {"train.lr": {"uniform": [0.1, 1], "when": {"algorithm.muu": 1}}}}},
            "train.lr: when names algorithm.muu, which is no key here (did you mean 'algorithm.mu'?)",
        ),
    ],
)
def test_one_line_for_what_can_not_be_run(overrides, more, message, tmp_path):
    with pytest.raises(UserError) as error, opened(tmp_path, *overrides, **more):
        pass
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s" / "study.journal").exists()


def test_what_is_fixed_on_the_command_line_is_searched_no_more():
    (spec,) = read_sweeps(described(), ["algorithm.mu=0.25"])
    assert list(spec.raw_space) == ["train.lr"]
    assert spec.base["algorithm.mu"] == 0.25


def test_the_work_stays_the_same_where_local_steps_are_searched():
    space = {"spaces": {"wide": {"train.local_steps": {"choice": [2, 4, 8]}}}}
    (spec,) = read_sweeps(described(**space))
    assert spec.base["run.iterations"] == 40
    assert "run.rounds" not in spec.base
    for steps in (2, 4, 8):
        assert load(merge_settings(spec.base, {"train.local_steps": steps})).rounds * steps == 40
    (spec,) = read_sweeps(described(**space), ["run.iterations=80"])
    assert spec.base["run.iterations"] == 80
    (spec,) = read_sweeps({**described(**space), "base": {"run.rounds": 1e1, "train.local_steps": 2}})
    assert spec.base["run.iterations"] == 20


def test_each_environment_is_a_sweep_of_its_own():
    values = {"data.partition.alpha": [0.1, 1], "train.cohort_size": [3, 5]}
    specs = read_sweeps(described(environments=values), ["tune.name=n"])
    assert [spec.name for spec in specs] == [
        f"n/alpha-{a}-cohort_size-{c}" for a, c in itertools.product([0.1, 1], [3, 5])
    ]
    assert [spec.base["data.partition.alpha"] for spec in specs] == [0.1, 0.1, 1, 1]
    assert len(read_sweeps(described(environments=values), ["data.partition.alpha=2"])) == 2


def test_a_file_and_its_base_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text("algorithm: {name: fedavgm}\ntrain.lr: 0.5\n")
    (tmp_path / "my.yaml").write_text("base: base.yaml\nspaces: {wide: {algorithm.beta: {uniform: [0, 0.9]}}}\n")
    (spec,) = read_sweeps(tmp_path / "my.yaml")
    assert spec.name == "my"
    assert spec.base == {"algorithm.name": "fedavgm", "train.lr": 0.5}


def test_the_record_of_a_sweep_is_a_space_file_that_means_the_same(tmp_path):
    (spec,) = read_sweeps(described(first=[{"algorithm.mu": 0.1, "train.lr": 0.1}]), ["tune.trials=7", "tune.name=r"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "sweep.yaml").write_text(yaml.safe_dump(spec.record()))
    for where in (tmp_path / "r", tmp_path / "r" / "sweep.yaml"):
        (again,) = read_sweeps(where)
        assert again.record() == spec.record()
        assert again.folder == tmp_path / "r"
    (tmp_path / "r").rename(tmp_path / "renamed")
    (again,) = read_sweeps(tmp_path / "renamed")
    assert again.folder == tmp_path / "renamed"


# ---------------------------------------------------------------- the files that come with fedray


def test_every_algorithm_has_a_space_file():
    assert set(known_algorithms()) <= set(known_spaces())


@pytest.mark.parametrize("name", known_spaces())
def test_a_space_file_is_of_its_algorithm_and_begins_with_the_base(name):
    """Both spaces can be read, and the wide one holds the algorithm's defaults in its paper's setting."""
    for space in read_file(known_spaces()[name])["spaces"]:
        for spec in read_sweeps(name, [f"tune.space={space}"]):
            algorithm = spec.base["algorithm.name"]
            assert name.startswith(algorithm)
            assert trials_of(spec, spec.base) == (30 if space == "wide" else len(spec.space.grid({})))
            hyper = known_algorithms()[algorithm]().hyper.model_dump()
            defaults = {f"algorithm.{key}": value for key, value in hyper.items()} | {"train.server_lr": 1.0}
            defaults |= {"train.weight_decay": 0.0} | spec.base | (spec.first[0] if spec.first else {})
            if space == "wide":
                assert set(spec.space.stored({}, defaults)) == set(spec.raw_space)
            assert load(spec.base).rounds >= 25


def test_papers_grids():
    """As ALGORITHMS gives them, by hand."""

    def grid(name):
        (spec,) = read_sweeps(name, ["tune.space=paper"])
        return {key.partition(".")[2]: text["grid"] for key, text in spec.raw_space.items()}

    common = {"server_lr": [1.0, 0.5, 0.1], "lr": [0.1, 0.05, 0.01], "weight_decay": [0.001, 0.0008, 0.0004]}
    assert grid("fedavg") == grid("scaffold") == grid("mime") == common
    assert grid("fedprox") == {"mu": [0.1, 0.01, 0.001], **common}
    without = {key: values for key, values in common.items() if key != "server_lr"}
    assert grid("feddyn") == {"alpha": [0.1, 0.01, 0.001], **without}
    assert grid("adabest") == {"mu": [0.1, 0.01, 0.001], **without}
    assert grid("fedavgm") == {"beta": [0.99, 0.9], **common}
    assert grid("mimemom") == {"beta": [0.99, 0.95, 0.9], **common, "lr": [0.3, 0.1, 0.05, 0.03, 0.01]}
    assert grid("fedcm") == {"alpha": [0.05, 0.1, 0.5], **common, "lr": [1.0, 0.5, 0.1]}
    assert grid("ghbm") == {"tau": [5, 10, 20, 40], "beta": [0.9], **common, "lr": [1.0, 0.5, 0.1]}
    assert grid("fedhbm") == {"beta": [1.0, 0.99, 0.9], **common}
    assert grid("fedtrip")["mu"][0] == 0.1
    assert grid("fedtrip")["mu"][-1] == 2.5
    assert grid("fedsiam_da") == {"mu": [0.05, 0.1, 0.2, 1.0]}
    assert grid("moon") == {"mu": [0.1, 1.0, 5.0, 10.0]}
    assert {spec.base["data.partition.alpha"] for spec in read_sweeps("pfedmo_xi")} == {0.05, 0.1, 1.0}


@pytest.mark.parametrize("name", known_suites())
def test_a_suite_gives_all_the_same_data_work_and_trials(name, monkeypatch):
    monkeypatch.setattr("fedray.data.source.load_source", lambda *a: small_source())
    suite = read_suite(name)
    assert len(suite.specs) >= 5
    for spec in suite.specs:
        first = suite.specs[0]
        assert spec.tune.trials == first.tune.trials
        assert {k: v for k, v in spec.base.items() if k.startswith("data.")} == {
            k: v for k, v in first.base.items() if k.startswith("data.")
        }
        assert spec.base["data.public_samples"] == 36
        config = load(spec.base)
        assert (config.train.weighting, config.model.head) == ("samples", "none")
        assert (config.train.momentum, config.train.weight_decay) == (0, 0)
        assert config.rounds * (config.train.local_steps or 0) == load(first.base).rounds * 10


# ---------------------------------------------------------------- the axis


def test_steps_of_the_axis():
    assert [steps_reached(row(r), "rounds", 10) for r in (1, 3, 9, 10, 11)] == [2, 6, 18, 20, 20]
    assert steps_reached(row(3), "bytes", 6 * 2 * 100) == 10
    assert steps_reached(row(3), "flops", 7 * 4.0) == 15
    assert value_of(row(3, 0.25), "validation_accuracy") == 0.25
    assert value_of(row(3), "bytes") == 600
    assert math.isnan(value_of(row(3), "train_accuracy"))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "pfedmo", "mime"])
def test_the_budget_is_what_a_whole_run_of_the_base_takes(algorithm, tmp_path):
    """Equal clients: the mean one is each."""
    settings = {**SETTINGS, "algorithm.name": algorithm, "data.partition.kind": "iid", "data.public_samples": 36}
    settings |= {"data.clients": 9, "run.rounds": 4, "run.output": str(tmp_path)}
    experiment, data = resolve(load(settings), Own(small_source()))
    last = fedray.simulate(settings, data=small_source()).metrics.iloc[-1]
    assert budget_of(experiment, data, "rounds") == 4
    assert budget_of(experiment, data, "bytes") == last["bytes_down"] + last["bytes_up"]
    assert budget_of(experiment, data, "flops") == pytest.approx(last["flops"], rel=1e-9)


# ---------------------------------------------------------------- trials and their messages


def test_a_trial_is_told_what_it_needs_and_its_folder(tmp_path):
    with opened(tmp_path, "tune.seeds=3", "run.seed=5") as sweep:
        assignment = sweep.next_trial()
        assert [run["run.seed"] for run in assignment.runs] == [5, 6, 7]
        assert len({run["run.name"] for run in assignment.runs}) == 3
        for run in assignment.runs:
            config = load(run)
            assert config.run.output == str(tmp_path / "s" / "trials" / "0000")
            assert (config.run.eval_test, config.run.log_clients, config.data.validation_samples) == (False, False, 36)
            # the base first
            assert (config.train.lr, config.model_dump()["algorithm"]["mu"]) == (0.1, 0.01)
        another = load(sweep.next_trial().runs[0])
        assert another.train.lr != 0.1


def test_the_mean_over_seeds_counts(tmp_path):
    with opened(tmp_path, "tune.seeds=2") as sweep:
        sweep.next_trial()
        told(sweep, 0, [5, 10], [0.1, 0.2], run=0, runs=2)
        sweep.report("0", RunEnd(0, "completed", row(10, 0.2)))
        told(sweep, 0, [5, 10], [0.3, 0.4], run=1, runs=2)
        sweep.report("0", RunEnd(1, "completed", row(10, 0.4)))
        sweep.report("0", TrialEnd(None))
        (trial,) = sweep.study.trials
        assert trial.value == pytest.approx(0.3)
        values = trial.intermediate_values
        assert (values[10], values[20]) == (0.1, 0.2)
        # within the second seed: the mean of what the first one reached and of what this one has
        assert (values[30], values[40]) == (pytest.approx(0.25), pytest.approx(0.3))


def test_bad_trials_are_pruned_also_between_seeds_but_not_at_their_end(tmp_path):
    options = (
        "tune.seeds=3",
        "tune.pruner.kind=median",
        "tune.pruner.n_startup_trials=2",
        "tune.pruner.grace_period=50",
    )
    with opened(tmp_path, *options) as sweep:

        def seed(number, run, accuracies):
            """Whether the trial is stopped in this seed's run or at its end."""
            if any(told(sweep, number, range(1, 11), accuracies, run, 3)):
                return True
            stopped = sweep.report(str(number), RunEnd(run, "completed", row(10, accuracies[-1])))
            if run == 2:
                sweep.report(str(number), TrialEnd(None))
            return stopped

        for number in range(2):
            sweep.next_trial()
            assert not any(seed(number, run, [0.5] * 10) for run in range(3))
        sweep.next_trial()
        assert told(sweep, 2, range(1, 11), [0.1] * 10, 0, 3) == [False] * 4 + [True]
        # good in the first seed, and so good in all; then bad in the second, by which the mean is
        sweep.next_trial()
        assert not seed(3, 0, [0.6] * 10)
        assert seed(3, 1, [0.1] * 10)
        # bad in its very last round alone
        sweep.next_trial()
        assert not seed(4, 0, [0.6] * 10)
        assert not seed(4, 1, [0.6] * 10)
        assert not seed(4, 2, [0.6] * 9 + [0.0])
        assert [trial.state.name for trial in sweep.study.trials] == ["COMPLETE"] * 2 + ["PRUNED"] * 2 + ["COMPLETE"]
        assert not sweep.running


def test_successive_halving_keeps_one_of_three_on_each_rung(tmp_path):
    """ASHA with rungs at 10, 30 and 90 %: of nine trials in the order of their values, worst last."""
    with opened(tmp_path, "tune.pruner.kind=asha", "tune.trials=9") as sweep:
        lengths = []
        for number in range(9):
            sweep.next_trial()
            answers = told(sweep, number, range(1, 11), [0.9 - 0.1 * number] * 10)
            lengths.append(len(answers))
            if not answers[-1]:
                ends(sweep, number, 0.9 - 0.1 * number)
        assert lengths[0] == 10
        assert lengths[3:] == [1] * 6
        assert sweep.finished


def test_a_diverged_trial_is_the_worst_and_a_failed_one_is_none(tmp_path):
    with opened(tmp_path, "tune.trials=3") as sweep:
        for _ in range(3):
            sweep.next_trial()
        sweep.report("0", RunEnd(0, "diverged", row(3, math.nan)))
        sweep.report("0", TrialEnd(None))
        sweep.report("1", TrialEnd("Traceback ...\nValueError: no\n"))
        ends(sweep, 2, 0.4)
        assert [trial.state.name for trial in sweep.study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
        assert sweep.study.trials[0].value == -math.inf
        assert (tmp_path / "s" / "trials" / "0001" / "error.txt").read_text().endswith("ValueError: no\n")
        assert [trial.number for trial in sweep.study.best()] == [2]
        assert sweep.finished
        assert sweep.study.retry_failed() == 1
        assert not sweep.finished
        again = sweep.next_trial()
        assert again.key == "3"
        assert load(again.runs[0]).train.lr == pytest.approx(sweep.study.trials[1].params["train.lr"])
    best = read_file(tmp_path / "s" / "best.yaml")
    assert flat(best)["run.name"] == "s-2"
    assert not {"run.output", "engine.device", "run.log_clients"} & flat(best).keys()


def test_several_objectives_give_a_front(tmp_path):
    objective = "tune.objective={validation_accuracy: max, bytes: min}"
    with opened(tmp_path, objective, "tune.trials=3", "tune.sampler=nsga2") as sweep:
        for number, (accuracy, size) in enumerate([(0.5, 100), (0.6, 200), (0.4, 150)]):
            sweep.next_trial()
            sweep.report(str(number), RunEnd(0, "completed", row(10, accuracy, size)))
            sweep.report(str(number), TrialEnd(None))
        assert [trial.number for trial in sweep.study.best()] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "s").glob("best*")) == ["best-0000.yaml", "best-0001.yaml"]


def test_the_picture_of_the_front_has_optunas_front(tmp_path, monkeypatch):
    """A trial that is worse in all is not on it, nor is one that diverged."""
    objective = "tune.objective={validation_accuracy: max, bytes: min}"
    with opened(tmp_path, objective, "tune.trials=5") as sweep:
        for number, (accuracy, size) in enumerate([(0.5, 100), (0.6, 200), (0.4, 150), (0.7, 300), (math.nan, 50)]):
            sweep.next_trial()
            status = "completed" if accuracy == accuracy else "diverged"
            sweep.report(str(number), RunEnd(0, status, row(10, accuracy, size)))
            sweep.report(str(number), TrialEnd(None))
        spec = sweep.spec
    drawn = {}
    # these trials have no runs
    monkeypatch.setattr(report, "learning_curves", lambda *arguments: None)
    monkeypatch.setattr(report, "save_figure", lambda figure, path: drawn.setdefault(path.name, figure) and path)
    report.write_report(spec)
    (line,) = drawn["pareto.png"].axes[0].lines
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0.5, 2000), (0.6, 4000), (0.7, 6000)]


def test_a_sweep_goes_on_with_what_was_running(tmp_path):
    with opened(tmp_path, "tune.trials=4") as sweep:
        first = [sweep.next_trial() for _ in range(3)]
        ends(sweep, 1, 0.5)
        with pytest.raises(Said, match="is in use by process"), opened(tmp_path, "tune.trials=4", say=Said.at_once):
            pass
    with opened(tmp_path, "tune.trials=4") as sweep:
        again = [sweep.next_trial() for _ in range(3)]
        assert again[:2] == [first[0], first[2]]
        assert again[2].key == "3"
        assert sweep.next_trial() is None
        assert not sweep.finished
        for key in (0, 2, 3):
            ends(sweep, key, 0.1)
        assert sweep.finished
    with opened(tmp_path, "tune.trials=5") as sweep:
        assert sweep.next_trial().key == "4"


def test_a_folder_holds_one_sweep(tmp_path):
    with opened(tmp_path):
        pass
    with (
        pytest.raises(UserError, match=r"holds another sweep \(tune.seeds differs\)"),
        opened(tmp_path, "tune.seeds=2"),
    ):
        pass
    with pytest.raises(UserError, match=r"train.batch_size differs"), opened(tmp_path, "train.batch_size=9"):
        pass
    # a run may be made longer; a sweep would have trials of two kinds
    with pytest.raises(UserError, match=r"\(run.rounds differs\)"), opened(tmp_path, "run.rounds=20"):
        pass
    with opened(tmp_path, "engine.actors=2", "tune.trials=5", "tune.max_concurrent_trials=1"):
        pass
    with opened(tmp_path, "tune.seeds=2", "tune.resume=false"):
        pass
    assert (tmp_path / "s.bak-1" / "study.journal").exists()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").touch()
    with pytest.raises(UserError, match="is not a sweep's folder"), opened(tmp_path, "tune.name=t"):
        pass


def test_what_ended_before_its_driver_heard_of_it(tmp_path):
    """A seed's run was finished when the driver was killed: only its end is told, and its value is the trial's."""
    with opened(tmp_path, "tune.seeds=2", "tune.pruner.kind=median") as sweep:
        sweep.next_trial()
        assert not sweep.report("0", RunEnd(0, "completed", row(10, 0.4)))
        assert sweep.study.trials[0].intermediate_values == {20: 0.4}


def test_an_interrupted_trial_goes_on_with_the_sweep(tmp_path):
    with opened(tmp_path, "tune.trials=1") as sweep:
        first = sweep.next_trial()
        sweep.report("0", TrialEnd(interrupted=True))
        assert not sweep.running
    with opened(tmp_path, "tune.trials=1") as sweep:
        assert sweep.next_trial() == first


def test_the_study_in_a_storage_of_the_users(tmp_path):
    url = f"tune.storage=sqlite:///{tmp_path / 'all.db'}"
    with opened(tmp_path, url) as sweep:
        sweep.next_trial()
        ends(sweep, 0, 0.5)
    with opened(tmp_path, url) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 1
    assert not (tmp_path / "s" / "study.journal").exists()
    # another folder, or a fresh one, is another sweep
    for other in ("tune.output=" + str(tmp_path / "elsewhere"), "tune.resume=false"):
        with pytest.raises(UserError, match="has a study s already"), opened(tmp_path, url, other):
            pass
    assert not (tmp_path / "s.bak-1").exists()
    with opened(tmp_path, url) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 1


def test_a_storage_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (spec,) = read_sweeps(described(), ["tune.storage=sqlite:///all.db"])
    assert spec.tune.storage == f"sqlite:///{tmp_path / 'all.db'}"
    (spec,) = read_sweeps(described(), ["tune.storage=sqlite:////all.db"])
    assert spec.tune.storage == "sqlite:////all.db"


def test_a_sweep_without_its_study_is_not_begun_again(tmp_path):
    with opened(tmp_path):
        pass
    # killed before its first trial
    (tmp_path / "s" / "study.journal").unlink()
    with opened(tmp_path) as sweep:
        sweep.next_trial()
        (tmp_path / "s" / "trials" / "0000").mkdir(parents=True)
        ends(sweep, 0, 0.5)
    record = (tmp_path / "s" / "sweep.yaml").read_bytes()
    elsewhere = f"tune.storage=sqlite:///{tmp_path / 'all.db'}"
    with pytest.raises(UserError, match=r"their study 's' is not in sqlite"), opened(tmp_path, elsewhere):
        pass
    assert (tmp_path / "s" / "sweep.yaml").read_bytes() == record
    whole = (tmp_path / "s" / "study.journal").read_bytes()
    for damaged, message in (
        (b"", "their study 'sweep' is not in study.journal"),
        (whole[: len(whole) // 2] + b"}\n" + whole[len(whole) // 2 :], "can't be read as a study: "),
        (b"\xff\xfe\n", "can't be read as a study: "),
        (b"[1]\n", "can't be read as a study: "),
    ):
        (tmp_path / "s" / "study.journal").write_bytes(damaged)
        with pytest.raises(UserError, match=message), opened(tmp_path):
            pass
        if damaged:
            assert (tmp_path / "s" / "study.journal").read_bytes() == damaged
    (tmp_path / "s" / "study.journal").write_bytes(whole)
    with opened(tmp_path) as sweep:
        assert sweep.study.count(TrialState.COMPLETE) == 1
    for damaged in (b"", record[: len(record) // 2], b"base: {}\nspaces: {}\ntune: {}\n"):
        (tmp_path / "s" / "sweep.yaml").write_bytes(damaged)
        with pytest.raises(UserError, match=r"sweep.yaml is "), opened(tmp_path):
            pass
        with pytest.raises(UserError, match=r"sweep.yaml is "):
            read_sweeps(tmp_path / "s")


def test_what_is_better_of_an_objective():
    for name, way in {"validation_accuracy": "max", "train_loss": "min", "bytes": "min", "wall_seconds": "min"}.items():
        (spec,) = read_sweeps(described(), [f"tune.objective={name}"])
        assert spec.tune.objective == {name: way}
    (spec,) = read_sweeps(described(), ["tune.objective={train_loss: max}"])
    assert spec.tune.objective == {"train_loss": "max"}


def test_the_order_of_objectives_and_the_kind_of_numbers_make_another_sweep(tmp_path):
    one = "tune.objective={train_loss: min, validation_accuracy: max}"
    with opened(tmp_path, one):
        pass
    other = "tune.objective={validation_accuracy: max, train_loss: min}"
    with pytest.raises(UserError, match=r"\(tune.objective differs\)"), opened(tmp_path, other):
        pass
    with opened(tmp_path, "tune.name=t", spaces={"wide": {"algorithm.mu": {"choice": [0, 1]}}}):
        pass
    floats = {"wide": {"algorithm.mu": {"choice": [0.0, 1.0]}}}
    with pytest.raises(UserError, match=r"\(spaces differs\)"), opened(tmp_path, "tune.name=t", spaces=floats):
        pass


def test_what_can_not_be_run_together_fails_as_a_trial(tmp_path):
    space = {"train.cohort_size": {"choice": [None, 2]}, "train.participation": {"choice": [None, 0.5]}}
    with opened(tmp_path, "tune.sampler=grid", spaces={"wide": space}) as sweep:
        for number in range(4):
            assignment = sweep.next_trial()
            assert assignment.key == str(number)
            assert assignment.runs[0]["run.seed"] == 0


def test_a_suite_has_no_algorithm_of_its_own(tmp_path):
    for base in ({"algorithm.name": "fedprox"}, {"algorithm": {"name": "fedprox"}}):
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({"base": base, "algorithms": ["fedavg"]}))
        with pytest.raises(UserError, match=r"algorithm.name is each algorithm's own"):
            read_suite(tmp_path / "s.yaml")
    with pytest.raises(UserError, match=r"algorithm.name is each algorithm's own"):
        read_suite("sample", ["algorithm.name=fedprox"])


def test_numbers_of_numpys():
    base = {**described()["base"], "data.clients": np.int64(4)}
    choice = np.array([0.01, 0.1])
    space = {"train.lr": {"loguniform": [1e-3, np.float64(1)]}, "algorithm.mu": {"choice": choice}}
    (spec,) = read_sweeps({"base": base, "spaces": {"wide": space}, "first": [{"train.lr": 1e-2}]})
    assert spec.base["data.clients"] == 4
    assert [(p.low, p.high, p.values) for p in spec.space.parameters] == [(0.001, 1.0, ()), (0, 0, (0.01, 0.1))]
    assert spec.space.stored(spec.first[0], {"algorithm.mu": 0.01}) == {"train.lr": 0.01, "algorithm.mu": "0.01"}
    assert yaml.safe_load(yaml.safe_dump(spec.record())) == spec.record()


def test_a_folder_of_sweeps_is_all_of_them(tmp_path):
    values = described(environments={"data.partition.alpha": [0.1, 1]})
    values["base"] |= {"data.partition.kind": "dirichlet"}
    specs = read_sweeps(values, [f"tune.output={tmp_path}", "tune.name=s"])
    for spec in specs:
        with open_sweep(spec, Own(small_source())):
            pass
    again = read_sweeps(tmp_path / "s")
    assert [spec.folder for spec in again] == [spec.folder for spec in specs]
    assert [spec.name for spec in again] == ["s/alpha-0.1", "s/alpha-1"]
    check_together(again)
    (tmp_path / "s").rename(tmp_path / "moved")
    assert [spec.folder.parent for spec in read_sweeps(tmp_path / "moved")] == [tmp_path / "moved"] * 2
    (tmp_path / "moved").rename(tmp_path / "s")
    (other,) = read_sweeps(described(), ["data.source=mnist", f"tune.output={tmp_path}", "tune.name=s/other"])
    with open_sweep(other, Own(small_source())):
        pass
    with pytest.raises(
        UserError, match=r"s/alpha-0.1 and s/other can't be run together, as data.source differs: name one"
    ):
        check_together(read_sweeps(tmp_path / "s"))


def test_a_trials_runs_are_made_one_after_another_and_only_once(tmp_path):
    """Without any driver: rounds, ends, a stop in the middle, and on from there."""
    with opened(tmp_path, "tune.seeds=2") as sweep:
        assignment = sweep.next_trial()
        heard = []

        def stop_after(rounds):
            def tell(message):
                heard.append(message)
                return isinstance(message, Round) and message.row["round"] == rounds

            return tell

        own = Own(small_source())
        # interrupted it keeps a checkpoint, from which it goes on
        folder = tmp_path / "s" / "trials" / "0000"
        end = run_trial(assignment, own, stop_after(None), lambda: len(heard) >= 4)
        assert (end.interrupted, end.error) == (True, None)
        assert [message.row["round"] for message in heard] == [1, 2, 3, 4]
        assert list(folder.glob("seed-0/checkpoints/round-*"))
        assert run_trial(assignment, own, stop_after(None)) == TrialEnd()
        kinds = [(type(message).__name__, message.run, int(message.row["round"])) for message in heard[4:]]
        assert kinds == [
            *[("Round", 0, r) for r in range(5, 11)], ("RunEnd", 0, 10), *[("Round", 1, r) for r in range(1, 11)],
            ("RunEnd", 1, 10),
        ]  # fmt: skip
        assert [message.is_last for message in heard if isinstance(message, Round)] == [False] * 19 + [True]
        assert all("test_accuracy" not in message.row for message in heard if isinstance(message, Round))
        # what has ended needs none
        assert not list(folder.glob("*/checkpoints"))
        heard.clear()
        run_trial(assignment, own, stop_after(None))
        assert [type(message).__name__ for message in heard] == ["RunEnd", "RunEnd"]
        # nor what is given up
        pruned = sweep.next_trial()
        run_trial(pruned, own, stop_after(4))
        assert len(read_metrics(tmp_path / "s" / "trials" / "0001" / "seed-0")) == 4
        assert not list((tmp_path / "s" / "trials" / "0001").glob("*/checkpoints"))


# ---------------------------------------------------------------- sums and tables

AMOUNTS = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@given(st.lists(AMOUNTS, min_size=1, max_size=4), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_as_many_trials_as_fit(bundles, nodes):
    """No more than the sum allows, and no node is over-full: exactly as many as a plain filling of the nodes."""
    wanted = [{"CPU": amount} for amount in bundles]
    count = _fitting([{"CPU": float(cpus)} for cpus in nodes], wanted)
    assert count * sum(bundles) <= sum(nodes) + 1e-9
    left = [float(cpus) for cpus in nodes]
    for trial in range(count + 1):
        for amount in bundles:
            place = next((i for i, free in enumerate(left) if free + 1e-9 >= amount), None)
            if place is None:
                assert trial == count
                return
            left[place] -= amount
    raise AssertionError("one more would have fitted")


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "give one space file, or one of: adabest"),
        (["tune", "pfedno"], "there is no space file or sweep pfedno (did you mean 'pfedmo'?)"),
        (["tune", "a", "b"], "give one space file"),
        (["tune", "--suite", "smaple"], "there is no suite smaple (did you mean 'sample'?)"),
        (["tune", "pfedmo", "--suite", "sample"], "--suite has its own space files"),
        (["tune", "pfedmo", "--report", "tune.name=nowhere"], "there is no study"),
        (["run", "--from-trial", "nowhere"], "there is no run in it"),
        (["run", "--from-trial", ""], "there is no run in it"),
        (["run", "--from-trial", "nowhere", "--print-config"], "--print-config goes without --from-trial"),
        (["tune", "pfedmo", "tune.objective={bytes:", "min}"], "a key=value with blanks needs quotes"),
        (["run", "my.yaml", "--from-trial", "nowhere"], "no file beside it, not my.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_shows_all_keys_and_spaces(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    shown = capsys.readouterr().out
    assert "tune.pruner.kind = none" in shown
    assert all(name in shown for name in known_spaces())
