"""Sums the uploads of a cohort's clients in a phase."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.algorithms import Algorithm
from fedray.core.tree import TreeSum
from fedray.core.vectors import Layout, Model, Vector
from fedray.engine.memory import available
from fedray.engine.output_check import Forms, check_same_forms
from fedray.engine.state.packing import on_host, tensor_over
from fedray.engine.tasks import PhaseResult, PhaseTask

LARGE = 1 << 24
"""The bytes of a node of the tree from which it stays on a GPU only if there is room (:data:`ROOM`)."""

ROOM = 16
"""The number of such nodes for which a GPU must have free memory so that a large node stays there."""


class CohortSums:
    """Adds up the results of a phase's tasks along the fixed summation tree.

    Therefore the order in which results arrive changes no bit. Results of a worker in this process are added up on the
    worker's device, and results of other processes on ``device``, to which the final sums are moved. The device of an
    addition changes no bit either.

    ``members`` is the number of clients in the cohort. The attribute ``scalars`` has the numbers that each client sent,
    by name, in the order of ids.
    """

    def __init__(self, algorithm: Algorithm, phase: str, members: int, layout: Layout, device: torch.device) -> None:
        self.algorithm, self.phase = algorithm, phase
        self.members, self.layout, self.device = members, layout, device
        self._forms: Forms | None = None
        self.scalars: dict[str, list[float]] = {}
        self._trees: dict[str, TreeSum] = {}
        self._scales: dict[str, list[float]] = {}
        self._models: set[str] = set()

    def add(self, task: PhaseTask, found: PhaseResult) -> None:
        """Adds the result of a task.

        Raises :class:`~fedray.errors.UserError` if its clients returned values of other forms than those of earlier
        tasks.
        """
        check_same_forms(found.forms, self._forms, self.algorithm, self.phase)
        self._forms = found.forms
        for name, partial in found.sums.items():
            tree = self._trees.setdefault(name, TreeSum(self.members))
            for node, value in partial.nodes.items():
                if isinstance(value, Tensor):
                    tree.add(node, _where_it_fits(value))
                    continue
                # results from other processes lie read-only in shared memory
                is_copy = self.device.type != "cpu"
                tree.add(node, tensor_over(value).to(self.device), read_only=not (value.flags.writeable or is_copy))
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
        """Returns the sums by name (float32). All results must have been added."""
        return {name: self._there(self._total(name, tree.total())) for name, tree in self._trees.items()}

    def _there(self, value: Vector) -> Vector:
        """Returns ``value`` on the server's device."""
        row = value.row if isinstance(value, Model) else value
        moved = on_host(row) if self.device.type == "cpu" else row.to(self.device)
        return self.layout.model(moved) if isinstance(value, Model) else moved

    def _total(self, name: str, total: Tensor) -> Vector:
        is_model = name in self._models
        if name in self._scales:
            # the divisor is put on the device, because a GPU would multiply by the inverse of a Python number
            scaled = total / torch.tensor(math.fsum(self._scales[name]), dtype=total.dtype, device=total.device)
            # counts are taken from one client and are not sums
            for place in self.layout.whole_numbers if is_model else ():
                scaled[place] = total[place]
            total = scaled
        return self.layout.rounded(total) if is_model else total.float()


def _where_it_fits(node: Tensor) -> Tensor:
    """Returns ``node``, moved to the CPU if it is large and its GPU has little free memory."""
    if node.device.type == "cpu" or node.nbytes < LARGE or ROOM * node.nbytes <= available(node.device):
        return node
    return on_host(node)
