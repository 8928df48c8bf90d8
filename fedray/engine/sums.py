"""Sums the uploads of a cohort's clients in a phase."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.algorithms import Algorithm
from fedray.core.tree import Rows, TreeSum, tree_for
from fedray.core.vectors import Layout, Model, Vector, row_of
from fedray.engine.memory import available
from fedray.engine.output_check import Forms, check_same_forms
from fedray.engine.state.packing import on_host, tensor_over
from fedray.engine.tasks import PhaseResult, PhaseTask
from fedray.util.named import Named

LARGE = 1 << 24
"""The bytes from which a partial sum (a node of the summation tree) stays on a GPU only if the GPU has room for
more (:data:`ROOM`)."""

ROOM = 16
"""A large partial sum stays on its GPU if the free memory there is at least this many times its size."""


class CohortSums:
    """Adds up what all clients of a cohort upload in one phase (a part of a round with one upload of every client),
    from the results of the phase's tasks.

    The additions follow the fixed binary tree of :mod:`fedray.core.tree`. Therefore a sum has the same bits in whatever
    order the results arrive, and on whatever devices they are added. Results of a worker in this process are added up
    on the worker's device (large ones on the CPU if a GPU has little free memory), and results of other processes on
    ``device``, the server's. The final sums are moved to ``device``.

    ``phase`` is the name of the phase, and ``members`` the number of clients in the cohort. ``layout`` says where the
    parameters are in a model's row of numbers. The attribute ``scalars`` has the numbers that clients send one by one
    (``Result.scalars``): it maps each name to a list with a number for each client, in the order of ids. ``gathered``
    has the uploads of which the clients' rows come one by one, each with its kind, such as "weighted_mean".
    """

    def __init__(self, algorithm: Algorithm, phase: str, members: int, layout: Layout, device: torch.device) -> None:
        self.algorithm, self.phase = algorithm, phase
        self.members, self.layout, self.device = members, layout, device
        self._forms: Forms | None = None
        self.scalars: dict[str, list[float]] = {}
        self._trees: dict[str, TreeSum | Rows] = {}
        self._scales: dict[str, list[float]] = {}
        self._models: set[str] = set()
        self.gathered: dict[str, str] = {}

    def add(self, task: PhaseTask, found: PhaseResult) -> None:
        """Adds the result ``found`` of ``task`` to the sums.

        Raises :class:`~fedray.errors.UserError` if the clients of this task returned values of other kinds or shapes
        than the clients of earlier tasks.
        """
        check_same_forms(found.forms, self._forms, self.algorithm, self.phase)
        self._forms = found.forms
        for name, partial in found.sums.items():
            for node, value in partial.nodes.items():
                if isinstance(value, Tensor):
                    self._trees.setdefault(name, tree_for(value, self.members)).add(node, _where_it_fits(value))
                    continue
                # results from other processes lie read-only in shared memory
                there, is_copy = tensor_over(value).to(self.device), self.device.type != "cpu"
                tree = self._trees.setdefault(name, tree_for(there, self.members))
                tree.add(node, there, read_only=not (value.flags.writeable or is_copy))
            if partial.gathered:
                self.gathered[name] = partial.weights
            if partial.is_model:
                self._models.add(name)
            if partial.scale is not None:
                self._place(self._scales, name, task, partial.scale)
        for name, values in found.scalars.items():
            self._place(self.scalars, name, task, values)

    def _place(self, columns: dict[str, list[float]], name: str, task: PhaseTask, values: list[float]) -> None:
        column = columns.setdefault(name, [math.nan] * self.members)
        for place, value in zip(task.positions, values, strict=True):
            column[place] = value

    def totals(self) -> dict[str, Vector]:
        """Returns the weighted sums of the clients' uploads, by the upload's name: models and vectors, float32, on the
        server's device. An upload that is gathered has a row for each client instead, ``[m, ...]``. Before that,
        :meth:`add` must have been called for the results of all tasks."""
        return Named((name, self._there(self._total(name, tree.total()))) for name, tree in self._trees.items())

    def _there(self, value: Vector) -> Vector:
        """Returns the sum ``value`` on the server's device."""
        row = row_of(value)
        moved = on_host(row) if self.device.type == "cpu" else row.to(self.device)
        return self.layout.model(moved) if isinstance(value, Model) else moved

    def _total(self, name: str, total: Tensor) -> Vector:
        is_model = name in self._models
        if isinstance(self._trees[name], Rows):
            return self.layout.model(total) if is_model else total
        if name in self._scales:
            # the divisor is put on the device, because a GPU would multiply by the inverse of a Python number
            scaled = total / torch.tensor(math.fsum(self._scales[name]), dtype=total.dtype, device=total.device)
            # counts are taken from one client and are not sums
            for place in self.layout.whole_numbers if is_model else ():
                scaled[place] = total[place]
            total = scaled
        return self.layout.rounded(total) if is_model else total.float()


def _where_it_fits(node: Tensor) -> Tensor:
    """Returns the partial sum ``node``, moved to the CPU if it is large and its GPU has little free memory."""
    if node.device.type == "cpu" or node.nbytes < LARGE or ROOM * node.nbytes <= available(node.device):
        return node
    return on_host(node)
