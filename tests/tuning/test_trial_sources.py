"""What every source of trials must do, and what connects a source to Ray Tune. No cluster is needed."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partition_checks import examples
from ray.tune.search import Searcher
from small_sweeps import ends, opened, row

from fedray.errors import UserError
from fedray.tuning.finals import Final, FinalRuns
from fedray.tuning.planned import Planned, PlannedRuns, unfinished
from fedray.tuning.planned_view import RunsView
from fedray.tuning.runner import Interrupted, SourceSearcher, SourceStopper
from fedray.tuning.sweep import NoView, Sweep
from fedray.tuning.trial import Assignment, Message, RunEnd, TrialEnd
from fedray.tuning.trial_source import CombinedTrialSource, TrialSource


@contextlib.contextmanager
def sweep(folder: Path) -> Iterator[Sweep]:
    with opened(folder, "tune.trials=4", "tune.sampler=random") as found:
        yield found


@contextlib.contextmanager
def continued_sweep(folder: Path) -> Iterator[Sweep]:
    """A sweep of which an earlier process ended one trial and left two running."""
    with sweep(folder) as before:
        for _ in range(3):
            before.next_trial()
        ends(before, 1, 0.5)
    with sweep(folder) as found:
        yield found


@contextlib.contextmanager
def final_runs(folder: Path) -> Iterator[FinalRuns]:
    """Three runs on fresh seeds, of which one is finished in its folder."""
    with opened(folder, "tune.trials=1") as found:
        found.next_trial()
        ends(found, 0, 0.5)
        final = Final(found.spec)
        done = final.folder(0) / "seed-2"
        done.mkdir(parents=True)
        (done / "summary.json").write_text(json.dumps({"status": "completed"}))
        yield FinalRuns(found, final, 3, NoView())


@contextlib.contextmanager
def combination(folder: Path) -> Iterator[CombinedTrialSource]:
    """A sweep and its final runs, which can't begin before the sweep has ended."""
    with sweep(folder) as found:
        yield CombinedTrialSource([found, FinalRuns(found, Final(found.spec), 2, NoView())])


@contextlib.contextmanager
def planned_runs(folder: Path) -> Iterator[PlannedRuns]:
    """Three runs of a published table, of which one is finished in its folder."""
    done = folder / "a/seed-1"
    done.mkdir(parents=True)
    (done / "summary.json").write_text(json.dumps({"status": "completed"}))
    planned = unfinished([Planned(f"a/seed-{seed}", {"run.seed": seed}) for seed in range(3)], folder)
    view = RunsView(tell=str)
    view.began([run.folder for run in planned])
    yield PlannedRuns(planned, folder, {}, view)


SOURCES: dict[str, tuple[Callable, int]] = {
    "sweep": (sweep, 4),
    "continued sweep": (continued_sweep, 3),
    "final runs": (final_runs, 2),
    "combination": (combination, 6),
    "planned runs": (planned_runs, 2),
}
"""How each kind of source is opened, and how many trials it has."""


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrialSource]:
    opener, _ = SOURCES[request.param]
    with opener(tmp_path) as found:
        found.expected = SOURCES[request.param][1]
        yield found


def complete(source: TrialSource, key: str, accuracy: float = 0.5) -> None:
    """Report that a trial has run through."""
    assert not source.report(key, RunEnd(0, "completed", {**row(10, accuracy), "test_accuracy": accuracy}))
    assert not source.report(key, TrialEnd())


def take_all(source: TrialSource) -> list[Assignment]:
    """All trials that a source gives, one after another, each of which runs through."""
    found = []
    while (assignment := source.next_trial()) is not None:
        found.append(assignment)
        complete(source, assignment.key)
    return found


def test_each_trial_is_returned_once(source):
    taken = take_all(source)
    assert len(taken) == source.expected
    assert len({assignment.key for assignment in taken}) == len(taken)
    runs = [(run["run.output"], run["run.name"]) for assignment in taken for run in assignment.runs]
    assert len(set(runs)) == len(runs)


def test_a_running_trial_is_not_returned_again(source):
    keys = []
    while (assignment := source.next_trial()) is not None:
        keys.append(assignment.key)
    assert len(set(keys)) == len(keys)
    for key in keys:
        complete(source, key)


def test_an_exhausted_source_returns_nothing_any_more(source):
    assert not source.exhausted
    take_all(source)
    for _ in range(3):
        assert source.exhausted
        assert source.next_trial() is None


def test_a_lost_trial_stays_the_callers_and_repeats_its_messages(source):
    first = source.next_trial()
    source.report(first.key, RunEnd(0, "completed", row(10, 0.1)))
    source.trial_lost(first.key, "its process died")
    others = []
    while (assignment := source.next_trial()) is not None:
        others.append(assignment.key)
    assert first.key not in others
    for key in (first.key, *others):
        complete(source, key)
    assert first.key not in [assignment.key for assignment in take_all(source)]
    assert source.exhausted


def test_a_failed_trial_is_never_returned_again(source):
    failed = source.next_trial()
    source.trial_failed(failed.key, "its process died (4 times)")
    told = source.next_trial()
    if told is not None:
        # a failure may also be what a trial itself reports
        source.report(told.key, TrialEnd("Traceback ...\nValueError: no"))
    keys = [assignment.key for assignment in take_all(source)]
    assert failed.key not in keys
    assert told is None or told.key not in keys
    assert source.exhausted


def test_an_interrupted_trial_is_not_returned_by_the_same_process(source):
    first = source.next_trial()
    source.report(first.key, TrialEnd(interrupted=True))
    assert first.key not in [assignment.key for assignment in take_all(source)]


ACTIONS = st.lists(st.tuples(st.sampled_from(["next", "complete", "lose", "fail", "diverge"]), st.integers(0, 9)))


@pytest.mark.parametrize("kind", SOURCES)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_exhausted_says_exactly_whether_there_will_be_another_trial(kind, actions, tmp_path_factory):
    opener, _ = SOURCES[kind]
    seen: set[str] = set()
    running: list[str] = []
    with opener(tmp_path_factory.mktemp("source")) as source:

        def take() -> bool:
            was_exhausted = source.exhausted
            assignment = source.next_trial()
            if assignment is None:
                # with nothing running, nothing can change any more
                assert running or source.exhausted
                return False
            assert not was_exhausted
            assert assignment.key not in seen
            seen.add(assignment.key)
            running.append(assignment.key)
            return True

        def end(how: str, key: str) -> None:
            if how == "complete":
                complete(source, key)
            elif how == "fail":
                source.trial_failed(key, "no")
            else:
                source.report(key, RunEnd(0, "diverged", row(3, math.nan)))
                source.report(key, TrialEnd())

        for action, number in actions:
            if action == "next":
                take()
            elif running and action == "lose":
                source.trial_lost(running[number % len(running)], "its process died")
            elif running:
                end(action, running.pop(number % len(running)))
        while running or not source.exhausted:
            if not take():
                end("complete", running.pop())
        assert source.next_trial() is None


class Recording:
    """A source of ``count`` trials that keeps what it is told, and stops every trial at its first message."""

    def __init__(self, count: int) -> None:
        self.left, self.told = list(range(count)), []

    @property
    def exhausted(self) -> bool:
        return not self.left

    def next_trial(self) -> Assignment | None:
        return Assignment(str(self.left.pop(0)), [], "train_loss", "rounds", 1.0) if self.left else None

    def report(self, key: str, message: Message) -> bool:
        self.told.append(("report", key, message))
        return True

    def trial_lost(self, key: str, error: str) -> None:
        self.told.append(("lost", key, error))

    def trial_failed(self, key: str, error: str) -> None:
        self.told.append(("failed", key, error))


def test_a_combination_tells_each_source_of_its_own_trials():
    one, other = Recording(1), Recording(2)
    both = CombinedTrialSource([one, other])
    keys = [both.next_trial().key for _ in range(3)]
    assert keys == ["0/0", "1/0", "1/1"]
    assert both.exhausted
    assert both.report("1/1", TrialEnd())
    both.trial_lost("0/0", "a")
    both.trial_failed("1/0", "b")
    assert one.told == [("lost", "0", "a")]
    assert other.told == [("report", "1", TrialEnd()), ("failed", "0", "b")]


def test_keys_with_slashes_are_routed_through_nested_combinations():
    inner = Recording(1)
    outer = CombinedTrialSource([Recording(0), CombinedTrialSource([inner])])
    assert outer.next_trial().key == "1/0/0"
    outer.trial_lost("1/0/0", "a")
    assert inner.told == [("lost", "0", "a")]


def test_the_searcher_suggests_a_lost_trial_again_and_gives_up_after_so_many_deaths():
    source = Recording(2)
    searcher = SourceSearcher(source, max_restarts=2)
    first = searcher.suggest("a")["assignment"]
    searcher.trial_died("a", "its process died: killed\nmore of it")
    assert source.told == [("lost", "0", "its process died: killed")]
    # it comes before trials that have not begun
    assert searcher.suggest("b")["assignment"] == first
    searcher.trial_died("b", "its process died")
    assert searcher.suggest("c")["assignment"] == first
    searcher.trial_died("c", "its process died")
    assert source.told[-1] == ("failed", "0", "its process died\nits process died (3 times)")
    assert searcher.suggest("d")["assignment"]["key"] == "1"
    assert searcher.suggest("e") is None
    searcher.on_trial_complete("d")
    assert searcher.suggest("f") == Searcher.FINISHED


def test_a_searcher_that_is_stopping_suggests_nothing_and_finishes_with_what_is_running():
    source = Recording(3)
    searcher = SourceSearcher(source, max_restarts=2)
    searcher.suggest("a")
    searcher.stopping = True
    assert searcher.suggest("b") is None
    searcher.on_trial_complete("a")
    assert searcher.suggest("c") == Searcher.FINISHED


def stopper_of(source: TrialSource, folder: Path, start_timeout: float = 60.0) -> SourceStopper:
    """Returns what asks ``source`` whether its trials stop; the first one has been suggested as "a"."""
    searcher = SourceSearcher(source, max_restarts=0)
    searcher.suggest("a")
    return SourceStopper(searcher, [{"CPU": 1.0}], start_timeout, threading.Event(), folder / "stop")


def test_messages_reach_the_source_which_decides_whether_a_trial_stops(tmp_path):
    source = Recording(1)
    stopper = stopper_of(source, tmp_path)
    message = RunEnd(0, "completed", {})
    assert stopper("a", {"messages": [message]})
    assert source.told == [("report", "0", message)]
    assert not stopper.stop_all()


def test_what_a_source_raises_is_kept_and_stops_all_trials(monkeypatch, tmp_path):
    source = Recording(1)
    stopper = stopper_of(source, tmp_path)
    first = ValueError("first")
    errors = iter([first, ValueError("second")])

    def broken(key: str, message: Message) -> bool:
        raise next(errors)

    monkeypatch.setattr(source, "report", broken)
    for _ in range(2):
        assert stopper("a", {"messages": [RunEnd(0, "completed", {})]})
    assert stopper.stop_all()
    assert stopper.error is first
    # the trials that are running keep what they need to go on
    assert (tmp_path / "stop").exists()


@pytest.mark.parametrize("broken", ["next_trial", "trial_lost", "trial_failed"])
def test_no_exception_of_a_source_reaches_tune(monkeypatch, tmp_path, broken):
    """Tune would end with trials that have not written their checkpoints."""
    source = Recording(2)
    stopper = stopper_of(source, tmp_path)
    stopper.searcher.max_restarts = int(broken == "trial_lost")

    def raising(*arguments: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(source, broken, raising)
    if broken == "next_trial":
        assert stopper.searcher.suggest("b") is None
    else:
        stopper.searcher.trial_died("a", "its process died")
    assert stopper.stop_all()
    assert str(stopper.error) == "no space left"
    assert (tmp_path / "stop").exists()


def test_all_stops_when_the_user_asks_for_it_and_no_trial_runs_any_more(tmp_path):
    stopper = stopper_of(Recording(2), tmp_path)
    trial = SimpleNamespace(trial_id="a")
    stopper.on_trial_start(1, [], trial)
    assert not stopper.stop_all()
    stopper.stopping.set()
    assert not stopper.stop_all()
    assert (tmp_path / "stop").exists()
    assert stopper.searcher.suggest("b") is None
    stopper.on_trial_complete(2, [], trial)
    assert stopper.stop_all()
    assert isinstance(stopper.error, Interrupted)


def test_a_run_of_other_settings_does_not_count_as_done(tmp_path, monkeypatch):
    """Nor does one with fewer rounds, which goes on."""
    settings = {
        "algorithm.name": "fedprox",
        "algorithm.mu": 0.1,
        "run.rounds": 5,
        "train.lr": 0.05,
        "model.head": "auto",
    }
    done = tmp_path / "a/seed-0"
    done.mkdir(parents=True)
    (done / "summary.json").write_text(json.dumps({"status": "completed"}))
    made = {"algorithm": {"name": "fedprox", "mu": 0.1}, "run": {"rounds": 5}, "train": {"lr": 0.05, "weight_decay": 0}}
    monkeypatch.chdir(tmp_path)
    made |= {"model": {"head": "none"}, "system": {"devices": str(tmp_path / "fast.yaml")}}
    (done / "config.yaml").write_text(json.dumps(made | {"engine": {"device": "cpu", "server_gpus": 0}}))

    def left(changes: dict[str, Any]) -> list[Planned]:
        return unfinished([Planned("a/seed-0", settings | changes)], tmp_path)

    assert not left({})
    assert not left({"system.devices": "fast.yaml"})
    assert len(left({"run.rounds": 6})) == 1
    for key, value, line in [
        ("algorithm.mu", 0.2, "algorithm.mu was 0.1, and is 0.2 now"),
        ("run.rounds", 4, "run.rounds was 5, and is 4 now"),
        ("train.lr", 0.1, "train.lr was 0.05, and is 0.1 now"),
    ]:
        with pytest.raises(
            UserError, match=f"^the run in {done} has ended, and was made with other settings \\({line}"
        ):
            left({key: value})
