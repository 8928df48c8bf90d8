"""The virtual clock against schedules that were computed by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from fedray.config import load
from fedray.system.availability import Always, Daily, Listed
from fedray.system.clock import Clock, PhaseCost
from fedray.system.devices import Devices

MILLION = 1e6


def clock(
    cohort=5, availability=None, phases=None, speeds=(1e6, 5e5, 2.5e5, 1e6, 1e6), mbps=1.0, latency=500.0, **keys
):
    """Five clients. Alone each takes, with these phases, 4 s and a million FLOPs in the first, and half as many and 2 s
    in the second."""
    count = len(speeds)
    devices = Devices(np.array(speeds), *(np.full(count, x) for x in (mbps, mbps, latency, 2.0)))
    phases = phases or [
        PhaseCost("train", 125_000, 250_000, np.full(count, 1e6)), PhaseCost("score", 0, 125_000, np.full(count, 5e5))
    ]  # fmt: skip
    system = load({f"system.{key}": value for key, value in keys.items()}).system
    return Clock(system, devices, availability or Always(), phases, cohort, seed=0)


def ask(made, ids=range(5), now=0.0, beside=None, **given):
    waits = None if beside is None else lambda phase, ids: beside.get(phase, 0.0)
    return made.ask(1, np.array(ids, np.int64), now, waits, **given)


def test_two_phases_on_a_shared_connection_with_all_that_can_happen_to_a_client():
    """Two answers of five clients are waited for. Clients 0 and 1 are used, client 2 is late, client 3 is gone after
    two seconds, and client 4 is not there."""
    times = Listed([[0], [0], [0], [0], [100]], [[500], [500], [500], [2], [200]])
    phases = [PhaseCost(name, 125_000, 62_500, np.full(5, 1e6)) for name in ("gradients", "train")]
    keys = {"cohort": 2, "phases": phases, "speeds": (1e6, 5e5, 1e6 / 6, 1e6, 1e6), "latency": 0.0}
    found = ask(clock(availability=times, server_mbps=1, over_select=2.5, **keys))
    assert found.outcomes == ["used", "used", "late", "dropped", "unavailable"]
    # four receive a million bits each, until 4 s; client 0 computes 1 s and sends half a million bits until 5.5, client
    # 1 computes 2 s and sends until 6.5, and client 2 computes 6 s and sends until 10.5; nobody sends for client 3.
    # Then two receive until 2 s, client 0 sends from 3 to 3.5 s, and client 1 from 4 to 4.5 s
    assert found.seconds[:3].tolist() == [5.5 + 3.5, 6.5 + 4.5, 10.5]
    assert np.isnan(found.seconds[3:]).all()
    assert found.duration == 6.5 + 4.5
    # client 2 has received, computed and sent what belongs to the first phase, and client 3 has received it
    assert (found.bytes_down, found.bytes_up, found.flops) == (250_000, 62_500, 1e6)
    assert found.trained.tolist() == [True, True, False, False, False]
    assert found.joules == 2.0 * (9 + 11 + 10.5)


def test_gone_in_the_second_phase():
    """What a client has done in the first one counts, in time, energy, bytes and FLOPs."""
    times = Listed([[0]] * 5, [[500]] * 4 + [[6]])
    found = ask(clock(availability=times))
    assert found.outcomes == ["used"] * 4 + ["dropped"]
    assert (found.bytes_down, found.bytes_up, found.flops) == (125_000, 250_000, 1e6)
    assert found.joules == pytest.approx(2.0 * (7.5 + 9.0 + 12.0 + 7.5 + 5.0))
    assert found.trained.all()


def test_a_phase_at_the_server_alone_needs_no_client():
    """Who has sent everything may go, and no deadline is waited for again."""
    phases = [PhaseCost("train", 125_000, 250_000, np.full(5, 1e6)), PhaseCost("score", 0, 0, np.zeros(5))]
    times = Listed([[0]] * 5, [[500]] * 4 + [[5.5]])
    found = ask(clock(availability=times, phases=phases, deadline_seconds=6.5), beside={"score": 20.0})
    assert found.outcomes == ["used", "used", "late", "used", "used"]
    assert found.duration == 20.0
    assert ask(clock(availability=times, phases=phases, deadline_seconds=6.5)).duration == 6.5


def test_a_round_without_anybody_does_not_wait_for_the_server():
    times = Listed([[100]] * 5, [[200]] * 5)
    assert ask(clock(availability=times, deadline_seconds=30), beside={"score": 100.0}).duration == 30


def test_a_cohort_that_was_given_is_waited_for():
    found = ask(clock(cohort=2), needed=5)
    assert found.outcomes == ["used"] * 5


def test_a_round_of_two_phases_lasts_until_the_slowest_has_answered_in_each():
    found = ask(clock())
    assert found.outcomes == ["used"] * 5
    # first phase: 4 + 1, 2 or 4; second: 2 + 0.5, 1 or 2
    assert found.seconds.tolist() == [7.5, 9.0, 12.0, 7.5, 7.5]
    assert found.duration == 8.0 + 4.0
    assert found.joules == 2.0 * sum(found.seconds)
    assert (found.bytes_down, found.bytes_up, found.flops) == (0, 0, 0)


def test_late_dropped_and_unavailable():
    # client 3 goes away after three seconds, and client 4 comes later
    times = Listed([[0], [0], [0], [0], [100]], [[500], [500], [500], [3], [200]])
    found = ask(clock(availability=times, deadline_seconds=7))
    assert found.outcomes == ["used", "used", "late", "dropped", "unavailable"]
    assert found.used.tolist() == [0, 1]
    # the server waits until the deadline, as clients 2 and 3 have not answered; then 3 s for client 1
    assert found.duration == 7.0 + 3.0
    assert found.seconds[:3].tolist() == [7.5, 9.0, 8.0]
    assert np.isnan(found.seconds[3:]).all()
    # in vain: client 2 all of the first phase, as if it had gone on, and nothing of the second; client 3 has received
    assert found.bytes_down == 2 * 125_000
    assert (found.bytes_up, found.flops) == (250_000, 1e6)
    assert found.trained.tolist() == [True, True, True, False, False]
    assert found.joules == 2.0 * (7.5 + 9.0 + 8.0)
    kept = ask(clock(availability=times, deadline_seconds=7, on_late="keep"))
    assert kept.outcomes == ["used", "used", "used", "dropped", "unavailable"]
    assert kept.duration == 8.0 + 4.0
    # without a deadline the server waits for client 3 until it goes, and then for the others
    assert ask(clock(availability=times)).duration == 8.0 + 4.0
    later = Listed([[0], [0], [0], [0], [100]], [[500], [500], [4], [500], [200]])
    assert ask(clock(availability=later)).duration == 6.0 + 3.0
    much_later = Listed([[0], [0], [0], [0], [100]], [[500], [500], [9], [500], [200]])
    # client 2 has done the first phase in 8 s, and goes a second later
    assert ask(clock(availability=much_later)).duration == 8.0 + 3.0


def test_what_the_server_computes_beside_the_clients_takes_time_where_it_is_waited_for():
    assert ask(clock(), beside={"score": 7.0}).duration == 8.0 + 4.0
    assert ask(clock(), beside={"score": 9.0}).duration == 9.0 + 4.0
    made = clock(server_flops_per_second=100.0)
    assert made.seconds_of_server(250.0) == 2.5
    assert clock().seconds_of_server(250.0) == 0.0


def test_the_first_to_answer_are_used():
    found = ask(clock(cohort=3, over_select=5 / 3))
    # clients 0, 3 and 4 answer at the same moment
    assert found.outcomes == ["used", "late", "late", "used", "used"]
    assert found.duration == 5.0 + 2.5
    found = ask(clock(cohort=2, over_select=2.5))
    assert Counter(found.outcomes) == {"used": 2, "late": 3}
    assert set(found.used) < {0, 3, 4}
    # with one that is gone, fewer than five can be waited for
    times = Listed([[0]] * 5, [[500], [500], [500], [500], [1]])
    assert ask(clock(cohort=4, availability=times, over_select=1.25)).duration == 8.0 + 4.0


def test_a_round_without_anybody():
    never = Listed([[1000]] * 5, [[2000]] * 5)
    found = ask(clock(availability=never, deadline_seconds=30), now=10.0)
    assert (found.duration, len(found.used), found.joules) == (30.0, 0, 0.0)
    assert ask(clock(availability=never), now=10.0).duration == 990.0
    # clients 0 and 1 never come again: the next one that does is waited for
    assert (
        ask(clock(availability=Listed([[0], [0], [20], [30], [40]], [[5]] * 2 + [[50]] * 3)), [0, 1], 6.0).duration
        == 14
    )
    assert ask(clock(availability=never), now=5000.0).duration == 0.0
    assert math.isclose(clock(dropout=0.999, deadline_seconds=7).ask(1, np.arange(5), 0.0).duration, 7.0)


def test_a_round_that_everybody_leaves_lasts_until_the_last_one_has_left():
    """One whose hours end goes then; one that never answers is waited for as long as if it did."""
    times = Listed([[0]] * 5, [[1], [2], [3], [4], [0.5]])
    assert ask(clock(availability=times)).duration == 4.0
    assert ask(clock(availability=times), now=1.5).duration == 2.5
    assert ask(clock(availability=times, deadline_seconds=30)).duration == 30.0
    # the slowest one needs 8 s for the first phase, and is gone or silent like all others
    assert ask(clock(dropout=0.9999)).duration == 8.0
    # five receive over 1 Mbit/s in 5 s; client 2 would have computed for 4 s, and sent alone for 2 s
    assert ask(clock(dropout=0.9999, server_mbps=1)).duration == 0.5 + 5.0 + 4.0 + 0.5 + 2.0


@pytest.mark.parametrize("deadline", [None, 700.0])
@pytest.mark.parametrize("hours", [(8, 9), (20, 1.5)])
def test_time_goes_on(hours, deadline):
    """Through hours in which nobody can end what it has begun, for a week, whatever the rounds before have taken."""
    made = clock(availability=Daily(*hours, np.array([0, 0.1, 0.2, 0.3, 6.0])), latency=1e6, deadline_seconds=deadline)
    now, moments = 0.0, 0
    while now < 7 * 86400:
        found = made.ask(moments + 1, np.arange(5), now)
        assert found.duration > 0
        now, moments = now + found.duration, moments + 1
    assert moments < (200 if deadline is None else 1000)


def test_a_phase_of_the_server_alone_costs_clients_nothing():
    phases = [PhaseCost("train", 125_000, 0, np.zeros(5)), PhaseCost("score", 0, 0, np.zeros(5))]
    found = ask(clock(phases=phases))
    assert found.duration == 0.5 + 1.0 + 0.5


def test_a_connection_that_is_shared():
    """Two clients that could receive and send 2 Mb/s share 1 Mb/s: both have received after 2 s, and compute for 1 and
    2 s. From 3 to 4 the first sends alone, 10^6 of its 2 10^6 bits; then both, until 6; then the second alone."""
    phase = PhaseCost("train", 125_000, 250_000, np.array([1e6, 2e6]))
    found = clock(2, None, [phase], (1e6, 1e6), 2.0, 0.0, server_mbps=1).ask(1, np.arange(2), 0.0)
    assert found.seconds.tolist() == [6.0, 7.0]
    # 3 Mb/s are enough for one of them, and for both a limit of 1.5 Mb/s
    found = clock(2, None, [phase], (1e6, 1e6), 2.0, 0.0, server_mbps=3).ask(1, np.arange(2), 0.0)
    first = 2 / 3 + 1 + 1
    # from there the second has a third of a second alone before, at 2 Mb/s
    assert found.seconds.tolist() == pytest.approx([first, 2 / 3 + 2 + 1])


def test_a_connection_that_is_wide_enough_changes_nothing():
    alone, wide = ask(clock(mbps=3.0)), ask(clock(mbps=3.0, server_mbps=15.0))
    assert wide.seconds.tolist() == alone.seconds.tolist()
    assert ask(clock(mbps=3.0, server_mbps=14.0)).seconds.tolist() != alone.seconds.tolist()


def test_who_does_not_answer_is_drawn_for_each_round():
    made = clock(dropout=0.3, deadline_seconds=100)
    gone = [
        [outcome == "dropped" for outcome in made.ask(number, np.arange(5), 0.0).outcomes] for number in range(1, 2001)
    ]
    assert np.mean(gone, axis=0) == pytest.approx([0.3] * 5, abs=0.04)
    again = clock(dropout=0.3, deadline_seconds=100)
    assert [outcome == "dropped" for outcome in again.ask(77, np.arange(5), 0.0).outcomes] == gone[76]
    together = np.corrcoef(np.array(gone, float).T)
    assert np.abs(together - np.eye(5)).max() < 0.1


def test_of_clients_alike_all_are_used_equally_often():
    """Which of those that answer at the same moment count is drawn anew in each round, from 13 of 20 clients."""
    made, draw = clock(10, speeds=[1e6] * 20, over_select=1.3), np.random.default_rng(0)
    used = Counter()
    for number in range(1, 2001):
        asked = made.ask(number, np.sort(draw.choice(20, 13, replace=False)), 0.0)
        assert len(asked.used) == 10
        used.update(asked.used.tolist())
    assert chisquare([used[client] for client in range(20)]).pvalue > 0.001
    ids = np.arange(13)
    assert made.ask(7, ids, 0.0).used.tolist() == made.ask(7, ids, 50.0).used.tolist()
    assert made.ask(7, ids, 0.0).used.tolist() != made.ask(8, ids, 0.0).used.tolist()


def test_what_the_server_computes_may_depend_on_those_who_are_left():
    times = Listed([[0], [0], [0], [0], [100]], [[500], [500], [500], [3], [200]])
    seen = []

    def beside(phase, ids):
        seen.append((phase, ids.tolist()))
        return 10.0 * len(ids) if phase == "score" else 0.0

    found = clock(availability=times).ask(1, np.arange(5), 0.0, beside)
    assert seen == [("train", [0, 1, 2, 3]), ("score", [0, 1, 2])]
    assert found.duration == 30.0 + 4.0


def test_times_do_not_depend_on_when_a_round_begins():
    made = clock(server_mbps=1.5)
    assert ask(made, now=1e6).seconds.tolist() == ask(made).seconds.tolist()
