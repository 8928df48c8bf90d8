"""Sums along one fixed binary tree, so that the way in which work is divided never changes a bit.

A sum over a cohort of m clients is taken over positions 0..m-1 (clients sorted by id). Node (level, index) of the tree
covers positions [index * 2**level, (index + 1) * 2**level); its value is the float64 sum of its two children, and a
node whose sibling lies wholly beyond the cohort is handed up as it is. Whoever holds all of a subtree may add it up
alone.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = tuple[int, int]


class TreeSum:
    """The sum of ``members`` float64 vectors along the fixed tree, from any mixture of leaves and complete subtrees.

    Memory: one vector per level when the leaves come in order. With ``in_place`` what is added is taken over; else it
    is only read.
    """

    def __init__(self, members: int, in_place: bool = True) -> None:
        self.members, self.in_place = members, in_place
        self.nodes: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Add the value of a node (a leaf is ``(0, position)``); ``value`` is float64."""
        level, index = node
        while index or (1 << level) < self.members:
            sibling = index ^ 1
            if (sibling << level) < self.members:
                other = self.nodes.pop((level, sibling), None)
                if other is None:
                    break
                value = other.add_(value) if self.in_place and other.shape == value.shape else other + value
            level, index = level + 1, index >> 1
        self.nodes[level, index] = value

    def total(self) -> Tensor:
        """The whole sum; all members must have been added."""
        (value,) = self.nodes.values()
        return value


def reduce_rows(rows: Tensor) -> Tensor:
    """The subtree over ``rows [C, ...]``, whose first row stands at a multiple of a power of two >= C."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = torch.cat([paired, rows[even:]]) if even < len(rows) else paired
    return rows[0]


def subtree(start: int, size: int) -> Node:
    """The lowest node that covers the positions start .. start + size - 1.

    ``start`` is a multiple of a power of two that is at least ``size``; unless ``size`` is that power, the cohort ends
    with these positions.
    """
    level, index = 0, start
    while (1 << level) < size:
        level, index = level + 1, index >> 1
    return level, index
