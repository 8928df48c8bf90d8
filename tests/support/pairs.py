"""Chooses the cases of a product that run every time; the others are marked slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
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


def alternately(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the product of two axes as parameters, in which each of ``values`` runs every time with one of ``others``
    in turn."""
    return [
        _parameter([value, other], number % len(others) == turn)
        for number, value in enumerate(values)
        for turn, other in enumerate(others)
    ]


def _parameter(values: Sequence[Any], fast: bool) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.slow)
