"""The schedule of asynchronous rounds, against one that was computed by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from fedray import UserError
from fedray.system.availability import Always, Daily, Listed
from fedray.system.buffered import Schedule
from fedray.system.transfers import Leg

SECONDS = (2.0, 3.0, 5.0, 7.0, 11.0)


def schedule(clients=5, availability=None, **changes):
    keys = {"buffer": 2, "concurrency": 3, "dropout": 0.0, "seed": 0, "capacity": math.inf} | changes
    return Schedule(
        lambda client: [Leg(SECONDS[client % 5], 0.0, 1.0)], availability=availability or Always(),
        present=np.arange(clients), **keys,
    )  # fmt: skip


def test_by_hand(monkeypatch):
    """Three of five clients train at a time, and two answers make an update."""
    drawn = iter([0, 1, 2, 3, 4, 0, 1, 2, 0, 3, 1, 0, 1, 0, 1, 0])
    monkeypatch.setattr(Schedule, "_draw", lambda self: next(drawn))
    made = schedule()
    assert [(start.client, start.began, start.ended, start.update) for start in made.begin_with(1)] == [
        (0, 0, 2, 1), (1, 0, 3, 1), (2, 0, 5, 2), (3, 2, 9, 3),
    ]  # fmt: skip
    assert [(start.client, start.began, start.ended, start.update) for start in made.begin_with(2)] == [
        (4, 3, 14, 4), (0, 5, 7, 2),
    ]  # fmt: skip
    updates = [made.update(number) for number in (1, 2, 3, 4)]
    assert [update.time for update in updates] == [3, 7, 10, 14]
    answers = [[(start.client, start.version, start.staleness) for start in update.answers] for update in updates]
    assert answers == [
        [(0, 1, 0), (1, 1, 0)], [(2, 1, 1), (0, 2, 0)], [(3, 1, 2), (1, 3, 0)], [(0, 4, 0), (4, 2, 2)],
    ]  # fmt: skip


def test_with_all_that_can_happen_to_a_client(monkeypatch):
    """Four clients share a connection of a million bits per second, and each receives and sends a million. Client 2
    never answers, and client 3 can be reached from 10 s on."""
    monkeypatch.setattr(Schedule, "_is_silent", lambda self, start: start.client == 2)
    computing = (1.0, 3.0, 2.0, 1.0)
    made = Schedule(
        lambda client: [Leg(0.0, 1e6, 1e9), Leg(computing[client], 1e6, 1e9)], 1e6,
        Listed([[0], [0], [0], [10]], [[500]] * 4), np.arange(4), buffer=2, concurrency=4, dropout=0.0, seed=0,
    )  # fmt: skip
    first, second = made.update(1), made.update(2)
    # three receive until 3 s; client 0 sends from 4 to 5 s, client 2 does not from 5 to 6 s, client 1 from 6 to 7 s
    assert first.time == 7
    assert [(each.client, each.began, each.ended) for each in first.answers] == [(0, 0, 5), (1, 0, 7)]
    assert [(each.client, each.ended) for each in first.dropped] == [(2, 6)]
    # three receive until 10 s; then client 3 receives alone until 11 s, client 0 sends from 11 to 12 s, and client 3
    # from 12 to 13 s
    assert second.time == 13
    assert [(each.client, each.began, each.ended) for each in second.answers] == [(0, 7, 12), (3, 10, 13)]


def test_clients_begin_when_they_can_be_reached():
    """One takes a thousand seconds; the others need not wait for it."""
    seconds = (1000.0, 5.0, 5.0, 5.0, 5.0)
    made = Schedule(
        lambda client: [Leg(seconds[client], 0.0, 1.0)], math.inf, Listed([[0], *[[10]] * 4], [[1e6]] * 5),
        np.arange(5), buffer=2, concurrency=3, dropout=0.0, seed=0,
    )  # fmt: skip
    assert made.update(1).time == 15
    assert {start.began for start in made.starts} == {0, 10, 15}


def test_a_moment_that_was_waited_for_is_not_later_than_another():
    """Client 0 can be reached again before client 1, which is waited for while client 0 trains."""
    made = Schedule(
        lambda client: [Leg(50.0, 0.0, 1.0)], math.inf, Listed([[0, 60], [100]], [[50, 1e6], [1e6]]), np.arange(2),
        buffer=1, concurrency=2, dropout=0.0, seed=0,
    )  # fmt: skip
    made.update(2)
    assert [(start.client, start.began) for start in made.starts][:2] == [(0, 0), (0, 60)]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_moment_of_a_day_is_one_at_which_a_client_is_there(seed):
    shifts = np.random.default_rng(seed).uniform(0, 24, 50)
    times = Daily(8, 20, shifts)
    for client, begins in enumerate(times.next_start(np.arange(50), 0.0).tolist()):
        assert times.until(np.array([client]), begins)[0] > begins


def test_asked_in_another_order_it_is_the_same():
    one, other = schedule(seed=3), schedule(seed=3)
    late = other.update(30)
    assert [vars(start) for start in one.begin_with(7)] == [vars(start) for start in other.begin_with(7)]
    assert [start.number for start in one.update(30).answers] == [start.number for start in late.answers]


def test_how_many_train_and_how_often():
    made = schedule(clients=50, concurrency=10, buffer=5)
    times = [made.update(number).time for number in range(1, 201)]
    assert times == sorted(times)
    events = sorted(
        [(start.began, 1) for start in made.starts] + [(start.ended, -1) for start in made.starts if start.update]
    )
    at_once, most = 0, 0
    for _, change in events:
        at_once += change
        most = max(most, at_once)
    assert most == 10
    # who trains for long is drawn less often, and nobody is left out
    drawn = Counter(start.client for start in made.starts)
    slow, fast = (np.mean([drawn[client] for client in range(which, 50, 5)]) for which in (4, 0))
    assert 2 < slow < fast
    everybody = [start for update in made.updates[:200] for start in update.answers]
    assert {start.client for start in everybody} == set(range(50))
    assert all(start.staleness >= 0 for start in everybody)


def test_who_is_gone_or_silent():
    made = schedule(clients=50, concurrency=10, dropout=0.3)
    updates = [made.update(number) for number in range(1, 101)]
    silent = sum(len(update.dropped) for update in updates)
    assert silent / (silent + 200) == pytest.approx(0.3, abs=0.07)
    assert all(len(update.answers) == 2 for update in updates)
    hours = Daily(0.0, 1.0, np.arange(50) % 24.0)
    made = schedule(clients=50, concurrency=4, availability=hours)
    for number in range(1, 400):
        for start in made.update(number).answers:
            since = (start.began - hours.starts[start.client]) % 86400
            assert since + start.ended - start.began <= 3600
    ends = schedule(availability=Listed([[0]] * 5, [[100]] * 5))
    assert ends.has(3)
    assert not ends.has(1000)
    last = max(number for number in range(1000) if ends.has(number))
    # the last one has fewer answers, and was waited for until the others should have answered
    assert 100 <= ends.update(last).time <= 100 + max(SECONDS)
    with pytest.raises(UserError, match=f"no client can be reached any more in round {last + 1}"):
        ends.update(last + 1)


def test_of_clients_alike_all_are_used_equally_often():
    """Those that answer at the same moment do so in the order in which they began, which is drawn."""
    made = Schedule(lambda client: [Leg(1.0, 0.0, 1.0)], math.inf, Always(), np.arange(20), 10, 13, 0.0, 0)
    used = Counter(start.client for number in range(1, 2001) for start in made.update(number).answers)
    assert chisquare([used[client] for client in range(20)]).pvalue > 0.001


def test_it_looks_no_further_than_the_run_goes():
    """The slowest client would answer after a million updates of the others."""
    made = Schedule(
        lambda client: [Leg(1.0 if client else 1e6, 0.0, 1.0)], math.inf, Always(), np.arange(4), 1, 4, 0.0, 0
    )
    starts = made.begin_with(1, last=20)
    assert [start.client for start in starts if start.update is None] == [0]
    assert len(made.updates) < 30
    assert {start.client for start in made.begin_with(15, last=20)} <= {1, 2, 3}


def test_of_many_clients_few_can_be_reached():
    """Each for three minutes of the day, at any time: whoever comes begins at once."""
    hours = Daily(0.0, 0.05, np.random.default_rng(0).uniform(0, 24, 10_000))
    made = schedule(clients=10_000, concurrency=60, buffer=10, availability=hours)
    made.update(100)
    began = np.array([start.began for start in made.starts])
    since = (began - hours.starts[[start.client for start in made.starts]]) % 86400
    assert (since < 180).all()
    _, first = np.unique([start.client for start in made.starts], return_index=True)
    assert (since[first][began[first] > 0] < 1e-6).all()
    assert (began > 0).any()


def test_clients_that_never_have_the_time_to_answer_together():
    """Alone each would need 4 s of the 5 in which it can be reached every day. Updates without answers are made."""
    hours = Daily(0, 5 / 3600, np.zeros(6))
    made = Schedule(lambda client: [Leg(0.0, 4.0, math.inf)], 1.0, hours, np.arange(6), 1, 2, 0.0, 0)
    assert [made.update(number).time for number in (1, 2)] == [2 * 86400 + 8, 5 * 86400 + 8]
    assert [len(made.update(number).answers) for number in (1, 2)] == [0, 0]


def test_they_share_the_connection():
    """Two clients that send 4 bits each over 1 bit per second, and a third that begins when the first has ended."""
    made = Schedule(lambda client: [Leg(0.0, 4.0, math.inf)], 1.0, Always(), np.arange(3), 1, 2, 0.0, 0)
    assert made.update(1).time == 8.0
    assert made.update(2).time == 8.0
    assert made.update(3).time == 16.0
