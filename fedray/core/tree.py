"""Sums along one fixed binary tree, so that the way in which work is divided changes no bit of a sum.

The sum over a cohort of m clients, sorted by id, is taken over the positions 0..m-1. Node (level, index) of the tree
covers the positions [index * 2**level, (index + 1) * 2**level). Its value is the float64 sum of its two children. A
node whose sibling lies wholly beyond the cohort passes its value on unchanged. So a worker that has all leaves of a
subtree can add them up alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = tuple[int, int]


PIECE = 1 << 16
"""How many numbers of each row are in double precision at a time. They fit into a processor's cache."""


class TreeSum:
    """The sum of ``members`` float64 vectors along the tree. Leaves and complete subtrees may be added in any order.

    It holds one vector for each level of the tree if the leaves are added in order.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.nodes: dict[Node, Tensor] = {}
        self._read_only: set[Node] = set()

    def add(self, node: Node, value: Tensor, read_only: bool = False) -> None:
        """Adds the float64 ``value`` of a node. A leaf is the node ``(0, position)``.

        The sum is written into the memory of one of the tensors that are added, unless they are ``read_only``.
        """
        level, index = node
        while index or (1 << level) < self.members:
            if (index ^ 1) << level < self.members:
                sibling = level, index ^ 1
                other = self.nodes.pop(sibling, None)
                if other is None:
                    break
                if sibling not in self._read_only:
                    value = other.add_(value)
                else:
                    value = other + value if read_only else value.add_(other)
                    self._read_only.remove(sibling)
                read_only = False
            level, index = level + 1, index >> 1
        self.nodes[level, index] = value
        if read_only:
            self._read_only.add((level, index))

    def add_rows(self, start: int, rows: Tensor, weights: Tensor, counts: Sequence[slice] = ()) -> None:
        """Adds ``weights [C, 1]`` times ``rows [C, ...]``, the leaves from position ``start`` on.

        Long rows are converted to double precision a piece at a time, so that no leaf is ever there as a whole.
        ``counts`` are places of whole numbers that have no average: only the leaf at position 0 adds its own there,
        unweighted.
        """
        for begin, end in subtrees(start, start + len(rows), self.members):
            own = slice(begin - start, end - start)
            self._add_subtree(begin, rows[own], weights[own], counts)

    def _add_subtree(self, start: int, rows: Tensor, weights: Tensor, counts: Sequence[slice]) -> None:
        """Does the same for leaves that :func:`subtree` takes."""
        flat = rows.reshape(len(rows), -1)
        level, index = subtree(start, len(rows))
        whole = slice(0, flat.shape[1])
        if whole.stop <= PIECE:
            self.add((level, index), _terms(start, flat, weights, counts, whole).view(rows.shape[1:]))
            return
        sibling = level, index ^ 1
        value = None if sibling in self._read_only else self.nodes.pop(sibling, None)
        is_new = value is None
        if value is None:
            value = torch.empty(rows.shape[1:], dtype=torch.float64, device=rows.device)
        into = value.view(-1)
        for place in range(0, whole.stop, PIECE):
            piece = slice(place, min(place + PIECE, whole.stop))
            terms = _terms(start, flat, weights, counts, piece)
            if is_new:
                into[piece] = terms
            else:
                into[piece] += terms
        self.add((level, index) if is_new else (level + 1, index >> 1), value)

    def total(self) -> Tensor:
        """Returns the whole sum. All members must have been added."""
        (value,) = self.nodes.values()
        return value


def _terms(start: int, flat: Tensor, weights: Tensor, counts: Sequence[slice], piece: slice) -> Tensor:
    """Returns the sum of the ``piece`` of the weighted rows ``flat [C, n]``, whose first is at position ``start``."""
    terms = reduce_rows(flat[:, piece].to(torch.float64, copy=True).mul_(weights))
    for each in counts:
        begin, end = max(each.start, piece.start), min(each.stop, piece.stop)
        if begin < end:
            terms[begin - piece.start : end - piece.start] = flat[0, begin:end].double() if start == 0 else 0
    return terms


def reduce_rows(rows: Tensor) -> Tensor:
    """Returns the sum of the subtree over ``rows [C, ...]``. The position of the first row must be a multiple of a
    power of two that is at least C."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = torch.cat([paired, rows[even:]]) if even < len(rows) else paired
    return rows[0]


def subtrees(start: int, stop: int, members: int) -> Iterator[tuple[int, int]]:
    """Yields ranges ``(start, stop)``, from left to right: the fewest subtrees of the tree over ``members`` positions
    that together are the positions start .. stop - 1."""
    while start < stop:
        # the largest subtree that begins here
        size = start & -start or 1 << (members - 1).bit_length()
        while min(start + size, members) > stop:
            size //= 2
        yield start, min(start + size, members)
        start += size


def subtree(start: int, size: int) -> Node:
    """Returns the lowest node that covers the positions start .. start + size - 1.

    Let P be the smallest power of two that is at least ``size``. ``start`` must be a multiple of P, and ``size`` may be
    less than P only if the cohort ends with these positions.
    """
    level, index = 0, start
    while (1 << level) < size:
        level, index = level + 1, index >> 1
    return level, index
