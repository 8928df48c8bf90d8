"""Sums what the clients of a cohort upload in a phase."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.algorithms import Algorithm
from fedray.core.tree import TreeSum
from fedray.core.vectors import Layout, Vector
from fedray.engine.output_check import Forms, check_same_forms
from fedray.engine.packing import tensor_over
from fedray.engine.tasks import PhaseResult, PhaseTask


class CohortSums:
    """Adds up the results of a phase's tasks along the fixed summation tree.

    The order in which results arrive therefore changes no bit. The parameter ``members`` is the number of clients in
    the cohort. The attribute ``scalars`` has the numbers that each client sent, by name, in the order of ids.
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
        """Takes the result of a task.

        Raises :class:`~fedray.errors.UserError` if its clients returned other things than those of the tasks before.
        """
        check_same_forms(found.forms, self._forms, self.algorithm, self.phase)
        self._forms = found.forms
        for name, partial in found.sums.items():
            tree = self._trees.setdefault(name, TreeSum(self.members))
            for node, value in partial.nodes.items():
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
        return {name: self._total(name, tree.total()) for name, tree in self._trees.items()}

    def _total(self, name: str, total: Tensor) -> Vector:
        is_model = name in self._models
        if name in self._scales:
            scaled = total / math.fsum(self._scales[name])
            # counts are one client's, and no sum
            for place in self.layout.whole_numbers if is_model else ():
                scaled[place] = total[place]
            total = scaled
        return self.layout.rounded(total) if is_model else total.float()
