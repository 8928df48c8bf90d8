"""What is done about actors that do not answer: a clock that is set by hand, and answers that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fedray.engine.ray import actors, watch
from fedray.engine.ray.actors import Member
from fedray.engine.ray.watch import TaskInFlight, Watch
from fedray.engine.tasks import EvalTask, PhaseTask

LIMIT, PATIENCE = 15.0, 120.0


def phase_task(clients: int, work: float = 100.0) -> PhaseTask:
    ids = list(range(clients))
    return PhaseTask(1, 0, [(0, clients)], clients, work, 0.1, ids, [1.0] * clients, [1] * clients, ids, [], [])


class Scene:
    """Two actors on two hosts, of which the first owes a task of four clients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.running = 1000.0, 0
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.lines: list[str] = []
        self.repeated: list[TaskInFlight] = []
        self.lost: list[Member] = []
        progress = SimpleNamespace(remote=lambda: ray.put(self.running))
        self.members = [
            Member(SimpleNamespace(progress=progress), host, host, 1, heard=self.now) for host in ("one", "two")
        ]
        self.owing: set[str] = set()
        self.sent: dict[Any, TaskInFlight] = {"result": TaskInFlight(self.members[0], phase_task(4), 0, at=self.now)}
        self.watch = Watch(
            lambda: self.members, self.sent, lambda: self.owing, self.lines.append, self.repeated.append,
            self.lost.append, LIMIT, PATIENCE,
        )  # fmt: skip

    def after_the_first_result(self) -> Scene:
        self.watch.arrived(self.members[1])
        return self

    def pass_time(self, seconds: float, answers: bool, idle: bool = False) -> None:
        """Second by second, in which the actors answer or do not."""
        for _ in range(round(seconds)):
            self.now += 1
            for question in list(self.watch.questions) if answers else ():
                self.watch.hear(question)
            self.watch.look(idle)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> Scene:
    return Scene(monkeypatch).after_the_first_result()


def test_before_the_first_result_the_user_hears_more(monkeypatch, ray_cluster):
    scene = Scene(monkeypatch)
    scene.pass_time(30, answers=True)
    assert scene.lines == [f"still waiting for 4 clients on one ({seconds} s) ..." for seconds in (5, 15, 25)]


def test_one_that_works_is_left_alone(scene):
    scene.pass_time(200, answers=True)
    assert scene.repeated == []
    assert scene.lost == []
    # one line a minute, so that the user knows
    assert scene.lines == [f"still waiting for 4 clients on one ({seconds} s) ..." for seconds in (60, 120, 180)]


def test_one_that_is_silent(scene):
    """The user is told after 10 s, others do its work after 15 s, and it is replaced after two minutes."""
    scene.pass_time(12, answers=False)
    assert scene.lines == ["no answer from one for 10 s; waiting for 4 clients"]
    assert scene.repeated == []
    scene.pass_time(3, answers=False)
    assert scene.lines[1:] == ["no answer from one for 15 s; doing 4 clients elsewhere"]
    assert [sent.task for sent in scene.repeated] == [scene.sent["result"].task]
    assert scene.members[0].silent
    scene.pass_time(20, answers=False)
    assert scene.lines[2:] == [f"no answer from one for {seconds} s; going on without it" for seconds in (20, 30)]
    assert len(scene.repeated) == 1
    assert scene.lost == []
    scene.pass_time(85, answers=False)
    assert scene.lost == [scene.members[0]]


def test_one_that_answers_again(scene):
    scene.pass_time(16, answers=False)
    scene.pass_time(3, answers=True)
    assert scene.lines[-1] == "one answers again"
    assert not scene.members[0].silent


def test_nobody_else_could_do_it(scene):
    del scene.members[1]
    scene.pass_time(40, answers=False)
    assert scene.repeated == []
    assert scene.lines == [f"no answer from one for {seconds} s; waiting for 4 clients" for seconds in (10, 20, 30, 40)]


def test_an_answer_that_was_lost(scene):
    """The actor has nothing to do, and its result does not come."""
    scene.running = None
    scene.pass_time(25, answers=True)
    assert scene.lines == ["an answer of one was lost; doing 4 clients again"]
    assert len(scene.repeated) == 1
    assert scene.sent == {}
    assert scene.lost == []
    # nor does the next one: there is something wrong with this actor
    scene.sent["other"] = TaskInFlight(scene.members[0], phase_task(2), 1, at=scene.now)
    scene.pass_time(25, answers=True)
    assert scene.lost == [scene.members[0]]


def test_lost_answers_count_only_in_a_row(scene):
    scene.running = None
    scene.pass_time(25, answers=True)
    scene.watch.arrived(scene.members[0])
    scene.sent["other"] = TaskInFlight(scene.members[0], phase_task(2), 1, at=scene.now)
    scene.pass_time(25, answers=True)
    assert scene.lost == []


def test_a_task_that_waits_behind_another_is_not_lost(scene):
    scene.sent["next"] = TaskInFlight(scene.members[0], EvalTask(None, [], "test", 0, 9), 1, at=scene.now)
    scene.pass_time(50, answers=True)
    assert scene.repeated == []


@pytest.mark.parametrize("idle", [False, True])
def test_one_that_takes_too_long(scene, idle):
    """Five seconds were expected: after twice as long and 2 s more, an actor that has nothing to do does it too."""
    scene.members[0].learn(100.0, 5.0)
    scene.pass_time(11, answers=True, idle=idle)
    assert scene.repeated == []
    scene.pass_time(10, answers=True, idle=idle)
    assert len(scene.repeated) == idle
    assert len([line for line in scene.lines if "more than twice as long as expected" in line]) == idle
    assert "result" in scene.sent


def test_what_waits_behind_a_task_that_is_late_is_done_elsewhere_too(scene):
    """In the time that both should take."""
    scene.members[0].learn(100.0, 5.0)
    scene.sent["next"] = TaskInFlight(scene.members[0], phase_task(2), 1, at=scene.now)
    scene.pass_time(13, answers=True, idle=True)
    assert [sent.number for sent in scene.repeated] == [0]
    scene.pass_time(8, answers=True, idle=True)
    assert [sent.number for sent in scene.repeated] == [0]
    scene.pass_time(2, answers=True, idle=True)
    assert [sent.number for sent in scene.repeated] == [0, 1]


def test_a_line_comes_every_ten_seconds_while_something_is_late(scene):
    scene.members[0].learn(100.0, 15.0)
    scene.pass_time(30, answers=True)
    assert scene.lines == []
    scene.pass_time(25, answers=True)
    assert [line.split("(")[1] for line in scene.lines] == [f"{seconds} s) ..." for seconds in (31, 41, 51)]


def test_a_host_that_owes_a_sum_alone(scene):
    scene.sent.clear()
    scene.owing = {"one"}
    scene.pass_time(16, answers=False)
    assert scene.members[0].silent
    assert scene.lines[-1] == "no answer from one for 15 s; going on without it"


def test_one_that_can_not_fetch_data_rests_twice_as_long_each_time_until_a_result_comes(scene, monkeypatch):
    monkeypatch.setattr(actors, "time", SimpleNamespace(monotonic=lambda: scene.now))
    member, rests = scene.members[0], []
    for _ in range(6):
        member.rest()
        rests.append(member.rests_until - scene.now)
    assert rests == [5, 10, 20, 40, 80, 80]
    scene.watch.arrived(member)
    member.rest()
    assert member.rests_until - scene.now == 5
