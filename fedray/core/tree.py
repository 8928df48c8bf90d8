"""Sums over clients along one fixed binary tree, so that no bit of a sum depends on how the work is divided.

The sum over a cohort of m clients, sorted by id, is taken over their positions 0..m-1. Node (level, index) of the tree
covers the positions [index * 2**level, (index + 1) * 2**level). Its value is the float64 sum of the values of its two
children. If all positions of one child lie beyond the cohort, it is the value of the other child. So a worker that has
all leaves of a subtree can add them up alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = tuple[int, int]


HELD_BYTES = 64_000_000
"""The most bytes of clients' rows that are collected before they are added up."""

CACHED = 1 << 17
"""How many numbers are in double precision at a time while rows are added up: as many as fit into a processor's
cache."""

CACHED_ON_GPU = 1 << 24
"""As :data:`CACHED`, but for GPUs (128 MB), on which most of the time goes into launching kernels."""


class TreeSum:
    """A sum of float64 vectors, one for each client of a cohort, that has the same bits in whatever order they are
    added.

    The vectors are added along a fixed binary tree, whose leaves are the clients' positions in the cohort. The node
    ``(level, index)`` of the tree is the sum over the positions index * 2**level to (index + 1) * 2**level - 1. If
    clients' vectors are added in the order of their positions, only one vector for each level of the tree is in memory.

    Args:
        members: the number of clients in the cohort, which is the number of leaves.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.nodes: dict[Node, Tensor] = {}
        self._read_only: set[Node] = set()

    def add(self, node: Node, value: Tensor, read_only: bool = False) -> None:
        """Adds one client's vector, or a sum that was already taken over several clients.

        The sum of two values is written into the memory of one of them, unless both are ``read_only``. The sum is on
        the device of the value that was added first.

        Args:
            node: ``(0, position)`` for the vector of the client at this position in the cohort, ``(level, index)`` for
                a sum over the 2**level positions from index * 2**level on.
            value: the vector or sum, float64.
            read_only: whether ``value`` must not be overwritten.
        """
        level, index = node
        while index or (1 << level) < self.members:
            if (index ^ 1) << level < self.members:
                sibling = level, index ^ 1
                other = self.nodes.pop(sibling, None)
                if other is None:
                    break
                if value.device != other.device:
                    value, read_only = value.to(other.device), False
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

    def take(self, node: Node) -> Tensor | None:
        """Removes the partial sum of ``node`` from the tree and returns it. The caller may overwrite it.

        ``node`` is a pair ``(level, index)``, which stands for the 2**level positions of the cohort from
        index * 2**level on. Returns None, and removes nothing, if the partial sum is read-only, or if the tree has none
        for this node: it was never added, or it was already added to that of the neighbouring node.
        """
        return None if node in self._read_only else self.nodes.pop(node, None)

    def total(self) -> Tensor:
        """Returns the sum over all clients of the cohort, once the values of all of them have been added."""
        (value,) = self.nodes.values()
        return value


class Rows:
    """The vectors of a cohort's clients one by one, where they are not added up: it takes them as :class:`TreeSum`
    does, but leaves every node by itself. They are float32, by which :func:`tree_for` knows them.

    Args:
        members: the number of clients in the cohort.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.nodes: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor, read_only: bool = False) -> None:
        """Adds the vector of the client at the position p of the cohort, as the node ``(0, p)``."""
        self.nodes[node] = value

    def total(self) -> Tensor:
        """Returns the vectors of all m clients of the cohort in the order of their positions, ``[m, ...]``."""
        first = self.nodes[0, 0]
        return torch.stack([self.nodes[0, position].to(first.device) for position in range(self.members)])


def tree_for(value: Tensor, members: int) -> TreeSum | Rows:
    """Returns what collects values such as ``value`` over a cohort of ``members`` clients: a sum of float64 values, or
    the clients' float32 rows one by one."""
    return TreeSum(members) if value.dtype == torch.float64 else Rows(members)


class LeafRows:
    """Collects clients' rows one by one, with the methods of :class:`LeafSum`. The rows are then in ``tree``."""

    def __init__(self, tree: Rows) -> None:
        self.tree = tree

    def add(self, start: int, rows: Tensor, weights: Tensor) -> None:
        """Adds the ``rows [C, ...]`` of the C clients at the positions ``start`` to start + C - 1 of the cohort."""
        for place, row in enumerate(rows):
            self.tree.add((0, start + place), row)

    def finish(self) -> None:
        """Does nothing."""


class LeafSum:
    """Computes a weighted sum of clients' float32 rows, such as their models, in double precision. :meth:`add` is
    called for each stack, and :meth:`finish` after the last one. The sum is then in ``tree``.

    Rows at neighbouring positions of the cohort are collected, up to about :data:`HELD_BYTES` bytes, and then added up
    together. This is done piece by piece, so that a long row is read only once and never copied to double precision as
    a whole.

    Args:
        tree: the sum over the cohort, to which the rows are added.
        counts: the slices of a row that hold counts, such as the number of batches that a layer has seen. Counts are
            not averaged: the sum gets those of the row at position 0 of the cohort, without a weight.
    """

    def __init__(self, tree: TreeSum, counts: Sequence[slice] = ()) -> None:
        self.tree, self.counts = tree, counts
        self._held: list[tuple[int, Tensor, Tensor]] = []
        self._stop = 0

    def add(self, start: int, rows: Tensor, weights: Tensor) -> None:
        """Adds ``weights [C, 1]`` times ``rows [C, ...]`` to the sum, for the C clients at the positions ``start`` to
        start + C - 1 of the cohort. The caller must not change the rows before :meth:`finish` is called, because they
        may be read only then."""
        if start != self._stop:
            self.finish()
        self._held.append((start, rows, weights))
        self._stop = start + len(rows)
        together = max(1, HELD_BYTES // max(1, rows[0].nbytes))
        # stop at a power of two, so that the collected rows are one subtree
        if self._stop % (1 << together.bit_length() - 1) == 0 or self._stop - self._held[0][0] >= together:
            self.finish()

    def finish(self) -> None:
        """Adds up the rows that :meth:`add` has collected and not yet added up. It must be called after the last
        :meth:`add`."""
        held, self._held = self._held, []
        for start, stop in subtrees(held[0][0], self._stop, self.tree.members) if held else ():
            parts = [
                (rows[max(0, start - first) : stop - first], weights[max(0, start - first) : stop - first])
                for first, rows, weights in held
                if first < stop and start < first + len(rows)
            ]
            self._add(start, stop, [rows for rows, _ in parts], torch.cat([weights for _, weights in parts]))

    def _add(self, start: int, stop: int, rows: Sequence[Tensor], weights: Tensor) -> None:
        """Adds up the ``rows`` of the positions ``start`` to stop - 1, each times its weight, and adds the result to
        ``tree`` as the value of the node over these positions."""
        shape, flat = rows[0].shape[1:], [part.reshape(len(part), -1) for part in rows]
        cached = CACHED if weights.device.type == "cpu" else CACHED_ON_GPU
        (level, index), width, piece = subtree(start, stop - start), shape.numel(), cached // (stop - start) or 1
        value = self.tree.take((level, index ^ 1))
        is_new = value is None
        if value is None:
            value = torch.empty(shape, dtype=torch.float64, device=weights.device)
        into = value.view(-1)
        scratch = torch.empty(stop - start, min(width, piece), dtype=torch.float64, device=weights.device)
        for begin in range(0, width, piece):
            place = slice(begin, min(begin + piece, width))
            terms = scratch[:, : place.stop - begin]
            torch.cat([part[:, place] for part in flat], out=terms)
            total = reduce_rows(terms.mul_(weights))
            self._count(flat[0][0] if start == 0 else None, place, total)
            into[place] = total if is_new else total.add_(into[place])
        self.tree.add((level, index) if is_new else (level + 1, index >> 1), value)

    def _count(self, first: Tensor | None, place: slice, total: Tensor) -> None:
        """Writes the counts of a row into ``total``, the piece ``place`` (a slice) of a sum. The counts are those of
        ``first``, the row at position 0 of the cohort, or zeros if ``first`` is None because the sum does not include
        that row."""
        for each in self.counts:
            begin, end = max(each.start, place.start), min(each.stop, place.stop)
            if begin < end:
                total[begin - place.start : end - place.start] = 0 if first is None else first[begin:end]


def reduce_rows(rows: Tensor) -> Tensor:
    """Returns the sum ``[...]`` of ``rows [C, ...]``, added in the order in which :class:`TreeSum` adds, and overwrites
    ``rows``. The position of the first row in the cohort must be a multiple of a power of two that is at least C."""
    step = 1
    while step < len(rows):
        left = rows[: len(rows) - step : 2 * step]
        left += rows[step :: 2 * step]
        step *= 2
    return rows[0]


def subtrees(start: int, stop: int, members: int) -> Iterator[tuple[int, int]]:
    """Splits the positions ``start`` to stop - 1 of a cohort of ``members`` clients into as few ranges as possible,
    each of which is covered by one node of the tree of :class:`TreeSum`. Yields each range as ``(start, stop)``, from
    left to right: (2, 4), (4, 6) for 2 to 5."""
    while start < stop:
        # the largest subtree that begins here
        size = start & -start or 1 << (members - 1).bit_length()
        while min(start + size, members) > stop:
            size //= 2
        yield start, min(start + size, members)
        start += size


def subtree(start: int, size: int) -> Node:
    """Returns the node ``(level, index)`` of the tree of :class:`TreeSum` whose value is the sum over the positions
    ``start`` to start + size - 1.

    Its level is the smallest with 2**level >= ``size``, and ``start`` must be a multiple of 2**level. If ``size`` is no
    power of two, these must be the last positions of the cohort; positions beyond the cohort add nothing to the node.
    """
    level, index = 0, start
    while (1 << level) < size:
        level, index = level + 1, index >> 1
    return level, index
