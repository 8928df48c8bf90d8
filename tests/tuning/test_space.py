"""Spaces: what is drawn lies in them, and what is wrong with a description is said in one line."""

import math
from decimal import Decimal

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedray.errors import UserError
from fedray.tuning.space import read_space

optuna.logging.set_verbosity(optuna.logging.ERROR)


def drawn(described, base=None, trials=30, seed=0):
    space = read_space(described, "here")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [space.suggest(study.ask(), base or {}) for _ in range(trials)]


@st.composite
def ranges(draw):
    kind = draw(st.sampled_from(["uniform", "loguniform", "int"]))
    if kind == "int":
        low = draw(st.integers(1, 50))
        span = draw(st.integers(1, 50))
        described = {kind: [low, low + span]}
        if draw(st.booleans()):
            described["log"] = True
        elif draw(st.booleans()):
            described["step"] = draw(st.integers(1, min(5, span)))
        return described
    low = draw(st.floats(1e-6, 10))
    return {kind: [low, low * draw(st.floats(1.5, 1000))]}


@given(ranges(), st.integers(0, 100))
def test_ranges_hold_what_is_drawn(described, seed):
    (kind,) = set(described) & {"uniform", "loguniform", "int"}
    low, high = described[kind]
    for values in drawn({"train.lr": described}, trials=5, seed=seed):
        value = values["train.lr"]
        assert low <= value <= high
        assert isinstance(value, int) == (kind == "int")
        if "step" in described:
            assert (value - low) % described["step"] == 0


@given(st.integers(0, 100), st.integers(1, 30), st.integers(0, 40), st.integers(1, 3), st.integers(0, 9))
@pytest.mark.filterwarnings("error")
def test_steps_are_as_one_writes_them(low, step, steps, digits, rest):
    """Of decimal numbers, from low to the last step that fits."""
    unit = Decimal(10) ** -digits
    all_of_them = [float((low + k * step) * unit) for k in range(steps + 2)]
    described = {"uniform": [all_of_them[0], float((low + (steps + 1) * step + rest % step) * unit)]}
    described["step"] = float(step * unit)
    space = read_space({"a": described})
    assert {values["a"] for values in drawn({"a": described}, trials=20)} <= set(all_of_them)
    for value in all_of_them:
        assert space.stored({"a": value}, {}) == {"a": value}
    assert space.parameters[0].high == all_of_them[-1]


@given(st.lists(st.one_of(st.integers(), st.booleans(), st.text(max_size=5), st.none()), min_size=1, max_size=5))
def test_lists_give_their_own_values(values):
    unique = [v for i, v in enumerate(values) if not any(v == o and type(v) is type(o) for o in values[:i])]
    for found in drawn({"a.b": {"choice": unique}}, trials=4):
        assert any(found["a.b"] == value and type(found["a.b"]) is type(value) for value in unique)


def test_a_list_may_hold_lists():
    assert {tuple(v["model.hidden"]) for v in drawn({"model.hidden": {"choice": [[10], [20, 20]]}})} == {
        (10,),
        (20, 20),
    }


def test_loguniform_draws_as_many_from_each_decade():
    values = [v["a"] for v in drawn({"a": {"loguniform": [1e-4, 1]}}, trials=400)]
    decades = [sum(10**e <= v < 10 ** (e + 1) for v in values) for e in range(-4, 0)]
    assert min(decades) > 70
    assert max(decades) < 130
    assert math.isclose(sum(decades), 400, abs_tol=1)


CONDITIONAL = {
    "algorithm.nesterov": {"choice": [True, False]},
    "algorithm.beta": {"uniform": [0.5, 0.9], "when": {"algorithm.nesterov": [True]}},
    "train.momentum": {"uniform": [0.1, 0.9], "when": {"algorithm.name": ["fedavg", "fedprox"]}},
}


def test_a_key_with_a_condition_is_searched_only_where_it_holds():
    for values in drawn(CONDITIONAL, base={"algorithm.name": "fedavg"}):
        assert ("algorithm.beta" in values) == values["algorithm.nesterov"]
        assert "train.momentum" in values
    assert not any("train.momentum" in values for values in drawn(CONDITIONAL, base={"algorithm.name": "moon"}))


def test_a_grid_has_each_combination_once():
    described = {
        "algorithm.nesterov": {"grid": [True, False]},
        "algorithm.beta": {"grid": [0.5, 0.9], "when": {"algorithm.nesterov": [True]}},
        "train.lr": {"grid": [1, 0.1]},
    }
    space = read_space(described)
    assert space.is_grid
    assert not read_space(CONDITIONAL).is_grid
    assert space.grid({}) == [
        {"algorithm.nesterov": True, "algorithm.beta": 0.5, "train.lr": 1},
        {"algorithm.nesterov": True, "algorithm.beta": 0.5, "train.lr": 0.1},
        {"algorithm.nesterov": True, "algorithm.beta": 0.9, "train.lr": 1},
        {"algorithm.nesterov": True, "algorithm.beta": 0.9, "train.lr": 0.1},
        {"algorithm.nesterov": False, "train.lr": 1},
        {"algorithm.nesterov": False, "train.lr": 0.1},
    ]


def test_values_from_outside_the_space_are_not_taken_for_a_first_trial():
    space = read_space({"a": {"uniform": [0, 1], "step": 0.25}, "b": {"int": [1, 9]}, "c": {"choice": [None, 1, True]}})
    assert space.stored({"a": 0.5, "b": 2, "c": None}, {}) == {"a": 0.5, "b": 2, "c": "null"}
    assert space.stored({"a": 0.5, "b": 2, "c": True, "other": 1}, {"c": None}) == {"a": 0.5, "b": 2, "c": "true"}
    for wrong in ({"a": 0.3}, {"a": 2.0}, {"b": 2.5}, {"b": True}, {"c": 2}):
        with pytest.raises(ValueError, match="is not in the space"):
            space.stored(wrong, {"a": 0.5, "b": 2, "c": 1})


def test_what_does_not_count_is_not_taken_for_a_condition():
    """b is what it is in the base as long as a is not 1, whatever is said of it."""
    described = {
        "a": {"choice": [0, 1]},
        "b": {"choice": [0.1, 1], "when": {"a": 1}},
        "c": {"choice": [0, 5], "when": {"b": [0.1]}},
    }
    space = read_space(described)
    base = {"a": 0, "b": 0.1, "c": 0}
    assert space.stored({"a": 0, "b": 1}, base) == {"a": "0", "c": "0"}
    assert space.stored({"a": 1, "b": 1}, base) == {"a": "1", "b": "1"}
    every = space.grid(base)
    assert all({**every[0]} != other for other in every[1:])
    # each value is met with what the others must be
    assert {"a": 1, "b": 0.1, "c": 5} in list(space.extremes({"a": 0, "b": 1, "c": 0}))


def test_large_and_small_steps():
    space = read_space({"a": {"uniform": [0, 1e6], "step": 0.01}, "b": {"int": [3, 10**17], "step": 10**10}})
    assert space.stored({"a": 543205.34, "b": 3 + 10**16}, {}) == {"a": 543205.34, "b": 3 + 10**16}
    assert space.parameters[1].high == 3 + (10**7 - 1) * 10**10
    assert read_space({"a": {"int": [1, 1e2]}}).parameters[0].high == 100


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({}, "give at least one key"),
        ({"a": 0.1}, "a: must say how it is searched, as in {uniform: [0, 1]}, not 0.1"),
        ({"a": {"unifrom": [0, 1]}}, "a: there is no 'unifrom' (did you mean 'uniform'?)"),
        ({"a": {"when": {"b": 1}}}, "a: must have one of uniform, loguniform, int, choice, grid, not none"),
        ({"a": {"uniform": [0, 1], "choice": [1]}}, "not uniform and choice"),
        ({"a": {"uniform": [1, 0]}}, "a: uniform needs [low, high], numbers with low < high, not [1, 0]"),
        ({"a": {"uniform": [0, True]}}, "needs [low, high]"),
        ({"a": {"uniform": [0, math.inf]}}, "needs [low, high]"),
        ({"a": {"uniform": [0, 1], "step": 2}}, "step must be a number above 0, up to 1, not 2"),
        ({"a": {"int": [1.5, 2]}}, "a: int needs [low, high], whole numbers"),
        ({"a": {"loguniform": [0, 1]}}, "a: on a logarithmic scale low must be above 0, not 0"),
        ({"a": {"uniform": [0, 1], "log": True}}, "log is true or false, and goes with int"),
        (
            {"a": {"int": [1, 9], "step": 0.5}},
            "step must be a whole number above 0, up to 8, not 0.5",
        ),
        (
            {"a": {"loguniform": [1, 9], "step": 2}},
            "step goes with a linear scale",
        ),
        ({"a": {"choice": []}}, "a: choice needs values, each once"),
        ({"a": {"choice": [1, 1.0]}}, "each once"),
        ({"a": {"choice": "abc"}}, "a: choice needs a list, not 'abc'"),
        ({"a": {"grid": [1, 2], "step": 1}}, "step and log go with int and uniform, not with grid"),
        ({"a": {"choice": [1], "when": 3}}, "a: when must be keys with values"),
        ({"a": {"choice": [1], "when": {"b": {"c": 1}}}}, "a: when needs values for a dotted key"),
        ({"a": {"choice": [1], "when": {"b": []}}}, "a: when needs values for a dotted key"),
        ({"a": {"choice": [1, 2]}, "b": {"choice": [1], "when": {"a": [2, 3]}}}, "b: when a=3 can never be"),
        ({"a": {"choice": [1], "when": {"b": 1}}, "b": {"choice": [1]}}, "a: when names b, which must come before it"),
    ],
)
def test_what_is_wrong_is_said(described, message):
    with pytest.raises(UserError) as error:
        read_space(described, "space.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("space.yaml: ")
    assert "\n" not in str(error.value)
