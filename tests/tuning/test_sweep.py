"""A sweep draws trials, and it prunes, ranks and ends them by the messages that their runs send. No Ray is needed."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_sweeps import described, ends, opened, row

import fedray
from fedray.config import flat, load, read_file
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.tables import read_metrics
from fedray.tuning import report
from fedray.tuning.axis import STEPS, amount, budget_of, steps_reached
from fedray.tuning.driver import sizes_of_trials
from fedray.tuning.resources import _fitting
from fedray.tuning.trial import Round, RunEnd, TrialEnd, run_trial


def told(sweep, number, rounds, accuracies, run=0, runs=1):
    """Reports a trial's rounds until the sweep stops it, and returns for each whether the sweep does."""
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


def test_steps_of_the_axis():
    assert [steps_reached(row(r), "rounds", 10) for r in (1, 3, 9, 10, 11)] == [2, 6, 18, 20, 20]
    assert steps_reached(row(3), "bytes", 6 * 2 * 100) == 10
    assert steps_reached(row(3), "flops", 7 * 4.0) == 15
    assert amount(row(3, 0.25), "validation_accuracy") == 0.25
    assert amount(row(3), "bytes") == 600
    assert math.isnan(amount(row(3), "train_accuracy"))


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "pfedmo", "mime"])
def test_the_budget_is_what_a_whole_run_of_the_base_takes(algorithm, tmp_path):
    """All clients are equal, so that the mean client is each of them."""
    settings = {**SETTINGS, "algorithm.name": algorithm, "data.partition.kind": "iid", "data.public_samples": 36}
    settings |= {"data.clients": 9, "run.rounds": 4, "run.output": str(tmp_path)}
    experiment, data = resolve(load(settings), CustomObjects(small_source()))
    last = fedray.simulate(settings, data=small_source()).metrics.iloc[-1]
    assert budget_of(experiment, data, "rounds") == 4
    assert budget_of(experiment, data, "bytes") == last["bytes_down"] + last["bytes_up"]
    assert budget_of(experiment, data, "flops") == pytest.approx(last["flops"], rel=1e-9)


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
    """ASHA has rungs at 10, 30 and 90 %, and nine trials come in the order of their values, the worst one last."""
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
    (best,) = [points for points in drawn["pareto.png"].axes[0].collections if points.get_label() == "Best Trial"]
    assert sorted(best.get_offsets().tolist()) == [[0.5, 2000], [0.6, 4000], [0.7, 6000]]


def test_from_eight_complete_trials_on_the_report_says_which_keys_matter(tmp_path):
    """The more important one of the two comes first; a trial that diverged is left out."""
    with opened(tmp_path, "tune.trials=12", "tune.sampler=random") as sweep:
        for number in range(12):
            lr = load(sweep.next_trial().runs[0]).train.lr
            if number == 5:
                sweep.report("5", RunEnd(0, "diverged", row(3, math.nan)))
                sweep.report("5", TrialEnd(None))
            else:
                ends(sweep, number, lr)
        written = {path.name for path in report.write_report(sweep.spec)}
    assert {"importance.csv", "importance.png", "contour.png", "slices.png", "history.png"} <= written
    table = pd.read_csv(tmp_path / "s" / "report" / "importance.csv")
    assert table["key"].tolist() == ["train.lr", "algorithm.mu"]
    assert table["trials"].tolist() == [11, 11]


def test_what_ended_before_its_driver_heard_of_it(tmp_path):
    """Where a seed's run ended while the driver was dead, the sweep hears of its end alone, and records its value."""
    with opened(tmp_path, "tune.seeds=2", "tune.pruner.kind=median") as sweep:
        sweep.next_trial()
        assert not sweep.report("0", RunEnd(0, "completed", row(10, 0.4)))
        assert sweep.study.trials[0].intermediate_values == {20: 0.4}


def test_what_no_trial_could_run_is_refused_before_the_first(tmp_path):
    """A trial has no test set, and its seeds are the sweep's."""
    with (
        pytest.raises(fedray.UserError, match="test_accuracy needs a test set"),
        opened(tmp_path, base=described()["base"] | {"run.stop_at": {"test_accuracy": 0.5}}),
    ):
        pass
    with (
        pytest.raises(fedray.UserError, match=r"run\.seed can't be searched"),
        opened(tmp_path, spaces={"wide": {"run.seed": {"choice": [0, 1]}}}),
    ):
        pass


def test_what_can_not_be_run_together_fails_as_a_trial(tmp_path):
    space = {"train.cohort_size": {"choice": [None, 2]}, "train.participation": {"choice": [None, 0.5]}}
    with opened(tmp_path, "tune.sampler=grid", spaces={"wide": space}) as sweep:
        for number in range(4):
            assignment = sweep.next_trial()
            assert assignment.key == str(number)
            assert assignment.runs[0]["run.seed"] == 0


def test_a_trials_runs_are_made_one_after_another_and_only_once(tmp_path):
    """A trial without a driver sends its rounds and ends; when it is interrupted, it goes on from there."""
    with opened(tmp_path, "tune.seeds=2") as sweep:
        assignment = sweep.next_trial()
        heard = []

        def stop_after(rounds):
            def tell(message):
                heard.append(message)
                return isinstance(message, Round) and message.row["round"] == rounds

            return tell

        own = CustomObjects(small_source())
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


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_that_a_callback_ends_counts_as_it_is(seeds, tmp_path):
    with opened(tmp_path, f"tune.seeds={seeds}", "run.eval_every=2") as sweep:
        assignment = sweep.next_trial()
        own = CustomObjects(small_source(), callbacks=(lambda report: report.round == 5,))
        heard = []

        def tell(message):
            heard.append(message)
            return sweep.report(assignment.key, message)

        sweep.report(assignment.key, run_trial(assignment, own, tell))
        ends_of_runs = [message for message in heard if isinstance(message, RunEnd)]
        assert [(each.run, each.status, each.row["round"]) for each in ends_of_runs] == [
            (run, "interrupted", 5) for run in range(seeds)
        ]
        # the last evaluation was two rounds after the one before
        at = [read_metrics(tmp_path / f"s/trials/0000/seed-{seed}")["validation_accuracy"][3] for seed in range(seeds)]
        (trial,) = sweep.study.trials
        assert (trial.state.name, trial.value) == ("COMPLETE", pytest.approx(sum(at) / seeds))


def test_a_trial_goes_on_after_a_run_that_a_callback_has_ended(tmp_path):
    with opened(tmp_path, "tune.seeds=2") as sweep:
        assignment = sweep.next_trial()
        folder = tmp_path / "s" / "trials" / "0000"
        heard = []

        def tell(message):
            heard.append(message)
            return False

        own = CustomObjects(small_source(), callbacks=(lambda report: report.round >= 5,))
        assert run_trial(assignment, own, tell, lambda: len(heard) > 7).interrupted
        assert run_trial(assignment, own, tell) == TrialEnd()
        assert [len(read_metrics(folder / f"seed-{seed}")) for seed in (0, 1)] == [6, 5]
        assert not list(folder.glob("*/checkpoints"))


def test_copies_of_the_best_configuration_are_left_alone(tmp_path):
    copies = ["best-for-paper.yaml", "best-7.yaml", "best.old.yaml"]
    with opened(tmp_path, "tune.trials=2") as sweep:
        for name in (*copies, "best-0007.yaml"):
            (tmp_path / "s" / name).touch()
        for number in range(2):
            sweep.next_trial()
            ends(sweep, number, 0.5)
    assert sorted(path.name for path in (tmp_path / "s").glob("best*")) == sorted([*copies, "best.yaml"])


def test_a_run_that_is_dearer_than_the_base_is_compared_after_its_end(tmp_path):
    """Its steps are over before its run is, which is no end of a run."""
    with opened(tmp_path, "tune.seeds=2", "tune.pruner.kind=median", "tune.pruner.axis=bytes") as sweep:
        sweep.next_trial()
        for number in (5, 10):
            half = Round(0, range(4 * number - 19, 4 * number + 1), row(number, number / 10, size=200), False)
            assert not sweep.report("0", half)
        assert 20 not in sweep.study.trials[0].intermediate_values
        sweep.report("0", RunEnd(0, "completed", row(10, 0.9, size=200)))
        assert sweep.study.trials[0].intermediate_values[20] == 0.9


def test_trials_that_may_differ_in_the_memory_that_they_take(tmp_path):
    space = {"algorithm.mu": {"uniform": [0.1, 1.0]}, "train.batch_size": {"choice": [8, 64]}}
    with opened(tmp_path, spaces={"wide": space}) as sweep:
        found = [(each.get("algorithm.mu"), each.get("train.batch_size")) for each in sizes_of_trials(sweep)]
        base = (sweep.base.get("algorithm.mu"), sweep.base.get("train.batch_size"))
    assert found == [base, (base[0], 8), (base[0], 64)]


AMOUNTS = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@given(st.lists(AMOUNTS, min_size=1, max_size=4), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_as_many_trials_as_fit(bundles, nodes):
    """As many trials fit as fill the nodes one after another, and so no node is over-full."""
    wanted = [{"CPU": amount} for amount in bundles]
    count = _fitting([{"CPU": float(cpus)} for cpus in nodes], wanted)
    assert count * sum(bundles) <= sum(nodes) + 1e-9
    left = [float(cpus) for cpus in nodes]
    for trial in range(count + 1):
        for wanted_amount in bundles:
            place = next((i for i, free in enumerate(left) if free + 1e-9 >= wanted_amount), None)
            if place is None:
                assert trial == count
                return
            left[place] -= wanted_amount
    raise AssertionError("one more would have fitted")
