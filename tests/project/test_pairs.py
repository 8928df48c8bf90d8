"""What is left out of a product by the tests that run every time."""

from __future__ import annotations

from itertools import combinations

from pairs import alternately, in_turn, pairwise


def fast(parameters):
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_every_pair_of_values_is_tried():
    axes = ["abcde", (1, 2, 3), (True, False), "xy"]
    chosen = fast(pairwise(*axes))
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in chosen} == {(a, b) for a in first for b in second}
    assert 15 <= len(chosen) < 20, "each letter with each number, and hardly more"
    assert len(pairwise(*axes)) == 60


def test_each_value_has_one_of_the_others_in_turn():
    assert fast(alternately("abc", [True, False])) == [("a", True), ("b", False), ("c", True)]
    assert len(alternately("abc", [True, False])) == 6


def test_tests_take_turns():
    assert fast(in_turn("abcde", 0, 2)) == [("a",), ("c",), ("e",)]
    assert fast(in_turn("abcde", 1, 2)) == [("b",), ("d",)]
    assert fast(alternately("abcd", [True, False], 1, 2)) == [("b", True), ("d", False)]
    assert len(alternately("abcd", [True, False], 1, 2)) == 8
