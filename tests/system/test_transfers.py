"""Transfers that share a connection, against a simulation in small steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedray.system.transfers import Journeys, Leg

legs = st.lists(
    st.builds(
        Leg,
        st.integers(0, 4).map(float),
        st.integers(0, 8).map(float),
        st.sampled_from([0.5, 1.0, 2.0, math.inf]),
    ),
    min_size=1,
    max_size=3,
)


def shares(most, capacity):
    """Max-min fairness by raising everybody's share little by little until nothing is left."""
    rates = [0.0] * len(most)
    left, open_ = capacity, [place for place, limit in enumerate(most) if limit > 0]
    while open_ and left > 1e-12:
        step = min(left / len(open_), min(most[place] - rates[place] for place in open_))
        for place in open_:
            rates[place] += step
        left -= step * len(open_)
        open_ = [place for place in open_ if most[place] - rates[place] > 1e-12]
    return rates


def in_small_steps(journeys, capacity, step=1 / 512):
    """Returns when each client has made all its legs, in steps of time so small that rounding does not matter."""
    states = [[[leg.seconds, leg.bits, leg.most] for leg in each] for each in journeys]
    ends, time = [None] * len(states), 0.0
    while None in ends:
        for place, left in enumerate(states):
            while left and left[0][0] <= 1e-9 and left[0][1] <= 1e-9:
                left.pop(0)
            if not left and ends[place] is None:
                ends[place] = time
        sending = [left[0] if left and left[0][0] <= 1e-9 else None for left in states]
        rates = shares([leg[2] if leg else 0.0 for leg in sending], capacity)
        for left, leg, rate in zip(states, sending, rates, strict=True):
            if leg:
                leg[1] -= rate * step
            elif left:
                left[0][0] -= step
        time += step
    return ends


@settings(deadline=None)
@given(st.lists(legs, min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 3.0]))
def test_against_small_steps(all_legs, capacity):
    simulated = Journeys(capacity)
    for who, each in enumerate(all_legs):
        simulated.launch(who, 0.0, each)
    found = {}
    while (arrival := simulated.next()) is not None:
        time, who = arrival
        assert time >= max(found.values(), default=0.0)
        found[who] = time
    expected = in_small_steps(all_legs, capacity)
    assert [found[who] for who in range(len(all_legs))] == pytest.approx(expected, abs=0.1)


def test_clients_that_come_later():
    journeys = Journeys(1.0)
    journeys.launch("a", 0.0, [Leg(0.0, 4.0, math.inf)])
    journeys.launch("b", 2.0, [Leg(0.0, 1.0, math.inf)])
    # a is alone for two seconds; b has half of the connection then
    assert journeys.next() == (4.0, "b")
    journeys.launch("c", 4.5, [Leg(0.0, 5.0, math.inf)])
    assert journeys.next() == (5.5, "a")
    assert journeys.next() == (10.0, "c")
    assert journeys.next() is None


def test_nobody_is_left_behind_by_rounding():
    journeys = Journeys(1e7 / 3)
    for who in range(200):
        journeys.launch(who, who / 7, [Leg(0.1, 1e6 / (who + 3), 1e5 * (1 + who % 3)), Leg(0.3, 1e5, 1e5 / 3)])
    arrivals = [journeys.next() for _ in range(200)]
    assert sorted(who for _, who in arrivals) == list(range(200))
    assert journeys.next() is None


@settings(deadline=None)
@given(st.lists(st.tuples(legs, st.integers(1, 3)), min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 3.0, math.inf]))
def test_several_that_do_the_same_are_as_slow_as_each_of_them(groups, capacity):
    alone, together = Journeys(capacity), Journeys(capacity)
    expected = []
    for each, count in groups:
        together.launch(len(expected), 0.0, each, count)
        for who in range(len(expected), len(expected) + count):
            alone.launch(who, 0.0, each)
        expected += [len(expected)] * count
    arrived = {who: time for time, who in iter(together.next, None)}
    single = {who: time for time, who in iter(alone.next, None)}
    assert [single[who] for who in range(len(expected))] == pytest.approx([arrived[who] for who in expected])
