"""Studies: each fact is recorded once, also across processes that are killed."""

import contextlib
import math
import multiprocessing
import os
import resource
import signal
from typing import get_args

import pytest
from optuna.trial import TrialState

from fedray.errors import UserError
from fedray.tuning.settings import TuneConfig
from fedray.tuning.space import read_space
from fedray.tuning.storage import hold_study, open_journal, open_storage
from fedray.tuning.study import Study

SPACE = read_space({"a.x": {"uniform": [0, 1]}, "a.k": {"choice": ["p", "q"]}})
SAMPLERS = get_args(get_args(TuneConfig.model_fields["sampler"].annotation)[0])
GRID = read_space({"a.x": {"grid": [0, 1]}, "a.k": {"grid": ["p", "q"]}})


def study(storage, space=SPACE, **options):
    return Study(storage, "s", space, {}, options.pop("directions", ["maximize"]), **options)


@contextlib.contextmanager
def kept(path):
    path.parent.mkdir(exist_ok=True)
    with hold_study(path, print):
        yield open_journal(path)


def states(found):
    return [trial.state.name for trial in found.trials]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_study_that_goes_on_in_new_processes_draws_what_one_process_would(sampler, tmp_path):
    """One trial per opening, or all in one: the same values, all different, also after the first ones at random."""
    space, count = (GRID, 4) if sampler == "grid" else (SPACE, 16)
    found = []
    for openings in (1, count):
        values = []
        for _ in range(openings):
            with kept(tmp_path / str(openings) / "j.log") as storage:
                opened_study = study(storage, space, sampler=sampler, seed=3, population=4)
                for _ in range(count // openings):
                    asked = opened_study.ask()
                    opened_study.complete(asked.number, [float(asked.values["a.x"])])
                    values.append(asked.values)
        found.append(values)
    assert found[0] == found[1]
    # children may be like a parent
    assert len({tuple(values.items()) for values in found[0]}) == count or sampler == "nsga2"
    if sampler in ("tpe", "cmaes", "nsga2"):
        # what was good is looked at more closely
        assert sum(v["a.x"] for v in found[0][12:]) > sum(v["a.x"] for v in found[0][:4])


@pytest.mark.parametrize("seed", [0, 1, 4295, 2**31 - 1])
@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsga2", "random"])
def test_any_seed(sampler, seed, tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, sampler=sampler, seed=seed)
        for _ in range(3):
            found.complete(found.ask().number, [0.5])
        assert [trial.value for trial in found.best()] == [0.5]


def test_of_equally_good_trials_the_first_is_the_best(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage)
        for value in (0.1, 0.5, 0.5):
            found.complete(found.ask().number, [value])
        assert [trial.number for trial in found.best()] == [1]


def test_a_queue_that_was_written_in_part_is_completed(tmp_path):
    """Killed while a grid was queued: what is there stays, the rest comes."""
    with kept(tmp_path / "j.log") as storage:
        study(storage, GRID, sampler="grid")
    lines = (tmp_path / "j.log").read_bytes().splitlines(keepends=True)
    (tmp_path / "j.log").write_bytes(b"".join(lines[:3]))
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, GRID, sampler="grid")
        assert 0 < len(found.trials) == 4
        values = [found.ask().values for _ in range(4)]
    assert sorted((v["a.x"], v["a.k"]) for v in values) == [(0, "p"), (0, "q"), (1, "p"), (1, "q")]


def test_what_was_running_is_handed_out_again_with_its_values(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        first = study(storage)
        asked = [first.ask() for _ in range(3)]
        first.complete(1, [0.5])
    with kept(tmp_path / "j.log") as storage:
        second = study(storage)
        again = [second.ask(), second.ask()]
        assert again == [asked[0], asked[2]]
        assert second.ask().number == 3
        for number in (0, 2, 3):
            second.complete(number, [0.1])
        assert states(second) == ["COMPLETE"] * 4


def test_the_first_values_come_first_and_only_where_they_are_searched(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, first=[{"a.x": 0.25, "a.k": "q", "a.other": 1}, {"a.x": 0.25, "a.k": "q"}])
        assert found.ask().values == {"a.x": 0.25, "a.k": "q"}
        assert found.ask().values["a.x"] != 0.25
    with kept(tmp_path / "k.log") as storage, pytest.raises(ValueError, match=r"a\.x=7 is not in the space"):
        study(storage, first=[{"a.x": 7, "a.k": "q"}])


def test_a_part_of_a_grid_is_from_all_of_it(tmp_path):
    """The first combinations would all have the first values. More trials go on with what is left."""
    space = read_space({"a.x": {"choice": [0, 1, 2]}, "a.y": {"choice": [0, 1, 2, 3]}, "a.k": {"choice": ["p", "q"]}})
    tried = []
    for most, count in ((6, 6), (24, 18)):
        with kept(tmp_path / "j.log") as storage:
            found = study(storage, space, sampler="grid", seed=1, most=most)
            for _ in range(count):
                asked = found.ask()
                found.complete(asked.number, [0.0])
                tried.append(tuple(asked.values.values()))
            assert len(found.trials) == most
    assert all(len(set(values)) > 1 for values in zip(*tried[:6], strict=True))
    assert len(set(tried)) == 24


def test_a_grid_is_tried_whole_and_once(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, GRID, sampler="grid", first=[{"a.x": 1, "a.k": "p"}])
        values = [found.ask().values for _ in range(4)]
    assert values[0] == {"a.x": 1, "a.k": "p"}
    assert sorted((v["a.x"], v["a.k"]) for v in values) == [(0, "p"), (0, "q"), (1, "p"), (1, "q")]


def test_the_ends_of_trials(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage)
        for _ in range(4):
            found.ask()
        assert not found.report(1, [10], 0.3)
        found.complete(0, [0.5])
        found.prune(1)
        found.fail(2, "client 3 failed")
        found.complete(3, [math.nan])
        trials = found.trials
        assert states(found) == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
        assert trials[1].value == 0.3
        assert trials[2].user_attrs["error"] == "client 3 failed"
        assert trials[3].value == -math.inf
        assert found.count(TrialState.COMPLETE) == 2
        with pytest.raises(KeyError):
            found.complete(0, [0.6])


def test_what_failed_is_tried_again_once(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        found = study(storage)
        asked = found.ask()
        found.fail(0, "no room")
        assert found.retry_failed() == 1
        assert found.retry_failed() == 0
        assert found.ask().values == asked.values
        found.complete(1, [0.5])
        assert found.retry_failed() == 0


def test_what_failed_comes_before_what_is_queued(tmp_path):
    """The sweep may end before all of the queue was tried, as with tune.trials below the size of a grid."""
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, GRID, sampler="grid")
        asked = [found.ask() for _ in range(3)]
        for number in (0, 2):
            found.complete(number, [0.5])
        found.fail(1, "no room")
    with kept(tmp_path / "j.log") as storage:
        found = study(storage, GRID, sampler="grid")
        assert found.retry_failed() == 1
        assert found.left(3) == 1
        again = found.ask()
        assert again.values == asked[1].values
        found.fail(again.number, "no room again")
        assert [trial.number for trial in found.failed] == [again.number]


def test_a_part_of_a_grid_grows_although_a_trial_was_tried_again(tmp_path):
    size = len(study(None, GRID, sampler="grid").trials)
    tried = []
    for most in (size - 1, size):
        with kept(tmp_path / "j.log") as storage:
            found = study(storage, GRID, sampler="grid", most=most)
            while found.left(most):
                asked = found.ask()
                if asked.number == 0:
                    found.fail(0, "no room")
                    assert found.retry_failed() == 1
                else:
                    found.complete(asked.number, [0.5])
                    tried.append(asked.values)
    assert len({tuple(values.values()) for values in tried}) == len(tried) == size


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_killed_between_the_choice_of_a_trial_and_its_values(sampler, tmp_path):
    with kept(tmp_path / "j.log") as storage:
        wanted = study(storage, sampler=sampler).ask()
    with kept(tmp_path / "k.log") as storage:
        study(storage, sampler=sampler)._study.ask()
    with kept(tmp_path / "k.log") as storage:
        assert study(storage, sampler=sampler).ask() == wanted


def test_a_full_disk_is_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kept(tmp_path / "j.log") as storage:
        found = study(storage)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "j.log").stat().st_size + 10, hard))
        try:
            with pytest.raises(UserError, match=r"can't write .*j.log: File too large; make room"):
                found.ask()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_report_that_is_repeated_after_a_restart_is_recorded_once(tmp_path):
    with kept(tmp_path / "j.log") as storage:
        first = study(storage)
        first.ask()
        first.report(0, [1], 0.1)
        first.report(0, [2], 0.2)
    with kept(tmp_path / "j.log") as storage:
        second = study(storage)
        second.ask()
        second.report(0, [2], 0.2)
        second.report(0, [3], 0.3)
        assert second.trials[0].intermediate_values == {1: 0.1, 2: 0.2, 3: 0.3}


def _ask_for_ever(path, told):
    with kept(path) as storage:
        found = study(storage)
        while True:
            asked = found.ask()
            found.report(asked.number, [1], 0.5)
            if asked.number % 2:
                found.complete(asked.number, [0.5])
            if asked.number >= 5:
                told.set()


def test_killed_at_any_moment_it_goes_on(tmp_path):
    """Four times: whatever was being written, nobody's lock stays and no line is torn."""
    path = tmp_path / "j.log"
    context = multiprocessing.get_context("spawn")
    before = 0
    for _ in range(4):
        told = context.Event()
        process = context.Process(target=_ask_for_ever, args=(path, told))
        process.start()
        assert told.wait(60)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with kept(path) as storage:
            trials = study(storage).trials
            assert len(trials) >= max(before, 6)
            assert [trial.number for trial in trials] == list(range(len(trials)))
            assert all(t.state == (TrialState.COMPLETE if t.number % 2 else TrialState.RUNNING) for t in trials[:-1])
            before = len(trials)


def test_a_torn_line_is_cut(tmp_path):
    path = tmp_path / "j.log"
    with kept(path) as storage:
        study(storage).ask()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 5, "trial_i')
    with kept(path) as storage:
        assert len(study(storage).trials) == 1
    assert path.read_bytes().startswith(whole)


def test_a_sweep_belongs_to_one_process(tmp_path):
    path = tmp_path / "j.log"
    said: list[str] = []
    taken = rf"is a sweep that another process runs \(process {os.getpid()} on "
    with (
        hold_study(path, said.append),
        pytest.raises(UserError, match=taken),
        hold_study(path, said.append, patience=0.3),
    ):
        pass
    assert len(said) == 1
    assert f"{path} is in use by process {os.getpid()} on " in said[0]
    with hold_study(path, said.append):
        pass
    assert len(said) == 1


def test_any_storage_of_optunas(tmp_path):
    found = study(open_storage(f"sqlite:///{tmp_path / 'study.db'}"))
    found.complete(found.ask().number, [0.5])
    assert len(study(open_storage(f"sqlite:///{tmp_path / 'study.db'}")).trials) == 1
    with pytest.raises(UserError, match=r"tune\.storage=nothing://"):
        open_storage("nothing://here")
