"""Chooses the cases of a product, and the tests of a class, that run every time; the others are marked slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from types import FunctionType
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Returns the product of ``axes`` as parameters, in which those cases run every time that together have each value
    of each axis with each value of each other axis."""
    # a value is named by its axis and its place there
    pairs = {case: set(combinations(enumerate(case), 2)) for case in product(*(range(len(axis)) for axis in axes))}
    left = set().union(*pairs.values())
    fast = set()
    while left:
        best = max(pairs, key=lambda case: len(pairs[case] & left))
        fast.add(best)
        left -= pairs[best]
    return [_parameter([axis[i] for axis, i in zip(axes, case, strict=True)], case in fast) for case in pairs]


def alternately(values: Sequence[Any], others: Sequence[Any], turn: int = 0, turns: int = 1) -> list[Any]:
    """Returns the product of two axes as parameters, in which each of ``values`` runs every time with one of ``others``
    in turn; with ``turns`` only every so-many-th of ``values``, beginning with number ``turn``, so that several tests
    of the same values take turns."""
    return [
        _parameter([value, other], number % turns == turn and number // turns % len(others) == place)
        for number, value in enumerate(values)
        for place, other in enumerate(others)
    ]


def in_turn(values: Sequence[Any], turn: int, turns: int) -> list[Any]:
    """Returns ``values`` as parameters, of which every ``turns``-th runs every time, beginning with number ``turn``:
    for several tests of the same values, which take turns."""
    return [_parameter([value], number % turns == turn) for number, value in enumerate(values)]


def later(test: Callable[..., None]) -> Callable[..., None]:
    """Returns a copy of a test of a class, for a class below, that is slow."""
    assert isinstance(test, FunctionType)
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    return pytest.mark.slow(copy)


def _parameter(values: Sequence[Any], fast: bool) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.slow)
